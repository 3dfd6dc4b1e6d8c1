"""The ranks' process groups, and the only collectives that the tuner calls.

Every collective marks the rank as waiting, so that the supervisor can tell who waits from who is waited for, and
raises `CollectiveFailed` when it fails.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import hooks
from .agreement import agree
from .failures import CollectiveFailed
from .steps import Steps

# For the ranks to meet, while others still import torch and FlashInfer on a busy machine, in seconds.
MEET_SECONDS = 180.0
_ANSWER_SECONDS = 5.0  # less than the supervisor waits beyond the timeout
# A rank that has nothing left to do waits for those that still tune. What limits that is their progress, which the
# watchdog sees, not a clock of the waiting rank.
_PATIENCE = datetime.timedelta(days=2)


@dataclass
class Ranks:
    """This rank among the others. `everyone` waits for days; the groups of `groups` for `--timeout` seconds."""

    rank: int
    world: int
    timeout: float
    steps: Steps
    everyone: Any
    groups: dict[tuple[int, ...], Any]
    hosts: tuple[str, ...] = ()  # names by rank, once the ranks have sent them

    def group(self, holders: Sequence[int]) -> Any:  # noqa: ANN401 - a ProcessGroup
        """The gloo group of the ranks that hold an op."""
        return self.groups[tuple(holders)]

    def gather(self, value: Any, group: Any = None) -> list[Any]:  # noqa: ANN401 - anything that pickles
        """All ranks' values in rank order (the ranks of `group`, by default everyone)."""
        group = self.everyone if group is None else group
        found: list[Any] = [None] * dist.get_world_size(group)
        with self._collective("gather"):
            dist.all_gather_object(found, value, group=group)
        return found

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - anything that pickles
        """The leader's value on every rank."""
        box = [value]
        with self._collective("broadcast"):
            dist.broadcast_object_list(box, src=0, group=self.everyone)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def contract(self, said: Mapping[str, Any], when: str, group: Any = None) -> None:  # noqa: ANN401
        """Gather what each rank says and raise `RanksDiffer` on every rank when a field differs."""
        agree(self.gather(hooks.changed("contract", dict(said), when), group), when)

    @contextlib.contextmanager
    def watched_reductions(self) -> Iterator[None]:
        """Let FlashInfer's own reductions mark this rank as waiting and fail like our collectives."""
        real = dist.all_reduce
        broken: list[CollectiveFailed] = []

        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - all_reduce's
            if broken:  # a group that failed once would make every further tactic wait for its timeout
                raise broken[0]
            try:
                with self._collective("all_reduce"):
                    return real(*args, **kwargs)
            except CollectiveFailed as error:
                broken.append(error)
                raise

        dist.all_reduce = watched
        try:
            yield
        finally:
            dist.all_reduce = real
        if broken:
            raise broken[0]

    @contextlib.contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        with self.steps.waiting():
            try:
                yield
            except Exception as error:
                line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise CollectiveFailed(f"{name} failed: {self._absent() or line}") from error

    def _absent(self) -> str:
        """After a collective failed: which rank of another node does not answer any more; empty where all do.

        Each rank that still runs says so in the store, which is on rank 0's host, and waits for the others. A store
        whose host is gone never answers: hence the thread.
        """
        if os.environ.get("LOCAL_WORLD_SIZE") == str(self.world):
            return ""  # the supervisor sees all of them
        store, answered = dist.distributed_c10d._get_default_store(), set[int]()

        def ask() -> None:
            with contextlib.suppress(Exception):  # the connection is lost
                store.set(f"runs/{self.rank}", "1")
                while len(answered) < self.world:
                    answered.update(r for r in range(self.world) if store.check([f"runs/{r}"]))
                    time.sleep(0.1)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        missing = [rank for rank in range(self.world) if rank not in answered]
        if not missing:
            return ""
        one = missing[0]
        where = f" on {self.hosts[one]}" if self.hosts else ""
        return f"rank {one}{where} does not answer: its host is gone, cannot be reached, or it stands still there"


def join(place: Path, endpoint: str, timeout: float, steps: Steps, subsets: Sequence[Sequence[int]]) -> Ranks:
    """Meet the other ranks over gloo and make a group, with a timeout of `timeout` seconds, for each set of holders.

    Several nodes meet at `endpoint` (`host:port` of node 0); where there is one node alone (empty), its ranks meet in a
    file of the run's directory `place`, so that no port has to be found.
    """
    steps.say("meeting the other ranks")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = datetime.timedelta(seconds=max(MEET_SECONDS, timeout))
    try:
        with steps.waiting():
            if endpoint:
                host, _, port = endpoint.rpartition(":")
                store = dist.TCPStore(host.strip("[]"), int(port), world, is_master=rank == 0, timeout=seconds)
            else:
                store = dist.FileStore(str(place / "meeting"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)
            everyone = dist.new_group(list(range(world)), timeout=_PATIENCE, backend="gloo")
            groups = {
                subset: dist.new_group(list(subset), timeout=datetime.timedelta(seconds=timeout), backend="gloo")
                for subset in dict.fromkeys(tuple(s) for s in subsets)
            }
    except Exception as error:
        raise CollectiveFailed(f"the ranks could not meet: {error}") from error
    return Ranks(rank, world, timeout, steps, everyone, groups)
