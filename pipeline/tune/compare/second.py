"""A second process of a rank, on its own device, that times entries as the rank does and decides nothing.

Where a process's memory lies, and so how fast some kernels run in it, is settled when it starts: times from a second
process show what those of one cannot. One that ends or does not answer in time is killed and not started again; the
entries that are left then keep the default, and the manifest says so.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline import run
from pipeline.tune import hooks
from pipeline.tune.steps import die_with_parent, starter

from .decide import Key

if TYPE_CHECKING:
    import torch

    from pipeline.contract.plan import OpPlan, Plan
    from pipeline.tune.collectives import Ranks
    from pipeline.tune.ops import Case
    from pipeline.tune.tuner import ObservedTuner, Question

    from .timing import Answer

_START = 180.0  # seconds to import and to take the device, on a machine that compiles meanwhile
_BEAT = 1.0

# An entry and its candidates by number: place of the runner, tactic as JSON
Offer = tuple[Key, Mapping[int, tuple[int, Any]]]
Tick = Callable[[str], None]
T = TypeVar("T")


def entries_at(tuner: ObservedTuner, plan: Plan, op: OpPlan, case: Case, bucket: int) -> list[list[Question]]:
    """For each entry that answers at `bucket`: its question there, and at other counts that it answers.

    In the order in which the op asks, which is the same in every process; where nothing is loaded, a miss stands for
    its entry.
    """
    from pipeline.tune.coverage import settings
    from pipeline.tune.tokens import compared_tokens

    counts = [bucket] if getattr(case, "bucket_only", False) else compared_tokens(op, plan, bucket)
    found: dict[str, list[Question]] = {}
    with settings(plan, op, tune=False):
        for tokens in counts:
            for question in tuner.ask(lambda tokens=tokens: case.call(tokens)):  # type: ignore[misc]
                if tokens == bucket or question.lookup.key in found:
                    found.setdefault(question.lookup.key, []).append(question)
    return list(found.values())


@dataclass
class Second:
    """The second process, as its rank sees it. `answer_seconds` is the timeout of one answer, in seconds.

    `wanted` says whether there should be one, `lost` why there is none any more.
    """

    wanted: bool = False
    answer_seconds: float = 60.0
    pool: ProcessPoolExecutor | None = None
    lost: str = ""
    _pid: int = 0

    def meet(self, ranks: Ranks) -> None:
        """Wait until it has started, before anything is timed; where one did not, no rank uses its own."""
        if self.pool is None:
            return
        ranks.steps.say("starting the second processes")
        why = ""
        try:
            self._pid = _wait(self.pool.submit(os.getpid), _START, ranks.steps.tick)
        except Exception as error:  # noqa: BLE001 - it may have ended in any way
            why = _why(error)
        for rank, said in enumerate(ranks.gather(why)):
            if said:
                self.dismiss(f"on rank {rank} it did not start: {said}")

    def time(self, asked: Sequence[Offer], rounds: int, tick: Tick) -> tuple[list[Answer], str]:
        """The answer for each entry, or why there is none."""
        assert self.pool is not None
        try:
            return _wait(self.pool.submit(time_here, asked, rounds), self.answer_seconds, tick), ""
        except Exception as error:  # noqa: BLE001
            return [], _why(error)

    def dismiss(self, why: str) -> None:
        """Do without it, and end it at once: whatever it still runs would disturb the rank."""
        if self.pool is not None:
            self.lost = f"compared without the second process: {why}"
            self.end()

    def end(self) -> None:
        """End it."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        self.pool = None


def _wait(future: Future[T], seconds: float, tick: Tick) -> T:
    """A result, while saying that this rank is alive. Raises `BrokenProcessPool`, `TimeoutError`, or what it raised."""
    until = time.monotonic() + seconds
    while True:
        tick("the second process")
        try:
            return future.result(timeout=max(0.01, min(_BEAT, until - time.monotonic())))
        except concurrent.futures.TimeoutError:
            if time.monotonic() >= until:
                raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _why(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def started(wanted: bool, plan: Path, device: torch.device, answer_seconds: float) -> Iterator[Second]:
    """Start the second process, if one is wanted, without waiting for it; end it on the way out."""
    os.environ.update(starter())
    found = Second(wanted, answer_seconds)
    try:
        if wanted:
            found.pool = run.process_of_functions(_set_up, str(plan), str(device))
            found.pool.submit(os.getpid)  # this starts it
        yield found
    finally:
        found.end()


# ── in the second process ──


_state: tuple[Plan, torch.device, ObservedTuner] | None = None


def _set_up(place: str, device: str) -> None:
    """Set up as a rank does, without meeting anyone."""
    global _state  # noqa: PLW0603 - what a process of a pool keeps between two calls
    die_with_parent()  # a rank that is killed takes us along
    os.dup2(2, 1)  # what a library prints is no data
    hooks.at("started")
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.arguments import read_plan
    from pipeline.tune.cpu_shim import CPU_KNOBS
    from pipeline.tune.tuner import ObservedTuner

    on = torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    tuner = ObservedTuner(CPU_KNOBS if on.type == "cpu" else {})
    flashinfer_api.install(tuner)
    _state = (read_plan(Path(place)), on, tuner)


def time_here(asked: Sequence[Offer], rounds: int) -> list[Answer]:
    """Time entries of one op, and keep nothing: the rank may need the memory.

    Raises `RuntimeError` where nothing runs on the device any more.
    """
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.failures import DeviceLost
    from pipeline.tune.ops import spec_of

    from .timing import Asked, Candidate, time_entries

    assert _state is not None
    plan, device, tuner = _state
    op = plan.ops[asked[0][0][0]]
    try:
        with torch.no_grad():
            case = spec_of(op).make(op, device, plan.seed)
            return time_entries(
                device,
                [
                    Asked(
                        entries_at(tuner, plan, op, case, bucket)[number],
                        {c: Candidate(runner, flashinfer_api.tactic_of(value)) for c, (runner, value) in offer.items()},
                        bucket,
                    )
                    for (_, bucket, number), offer in asked
                ],
                rounds,
            )
    except DeviceLost as lost:  # of this process, not of the rank
        raise RuntimeError(str(lost)) from lost
