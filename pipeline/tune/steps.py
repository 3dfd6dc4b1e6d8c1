"""Where each rank is: one small JSON file per rank, written through a memory map.

Storing into the map is no system call, so a rank can say its step before every measurement, and what it said
survives it whatever ends it. The supervisor reads the same files. Times are `time.monotonic`, one clock for all
processes of a host. Standard library only.

The step names the tactic that runs at the moment (`Attempt`), so that one that ends its process, or never returns, can
be left out when the ranks are started again.

Also: what the kernel says of a process, and a process that ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.contract.digest import canonical_json
from pipeline.contract.places import CACHE_FILE

ENV_STARTER = "PIPELINE_TUNE_STARTER"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIZE = 8192  # bytes of a step file; the JSON is padded with spaces
_TEXT = 300  # characters kept of a text: six bytes each at worst, so that the JSON always fits
_LONGEST = 2000  # characters of an attempt as JSON


@dataclass(frozen=True)
class Attempt:
    """A tactic of a runner, run for a profile of FlashInfer's; `entry` is the file key where a cache answered.

    All values as JSON has them. `bucket` is the token count that the profile stands for. `also` are the attempts that
    the same call looked up before this one and has not run yet, as of the two products of a MoE layer.
    """

    custom_op: str
    runner: str
    tactic: Any
    profile: Any
    bucket: int
    entry: str = ""
    also: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    @property
    def suspects(self) -> list[Attempt]:
        """What may have ended the process: the tactics of all entries of the call; a default only where it is alone."""
        every = [self, *(Attempt(**one) for one in self.also)]
        return [one for one in every if one.tactic != -1] or [self]

    @property
    def identity(self) -> bytes:
        """What tells this tactic at this profile from all others."""
        return identity(self.custom_op, self.runner, self.tactic, self.profile)

    @functools.cached_property  # comparing says one and the same before each of its samples
    def fits(self) -> dict[str, Any] | None:
        """As a JSON value that a step file has room for; None where it has not."""
        value = asdict(self)
        return next((one for one in (value, {**value, "also": []}) if len(json.dumps(one)) <= _LONGEST), None)


def identity(custom_op: str, runner: str, tactic: Any, profile: Any) -> bytes:  # noqa: ANN401 - JSON, or tuples of it
    """The bytes by which a tactic at a profile is known."""
    return canonical_json([custom_op, runner, tactic, profile])


@dataclass(frozen=True)
class Crash:
    """An attempt that ended a rank, or did not return: in which op of the plan, and what came of it."""

    op: str
    attempt: Attempt
    reason: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Crash:
        """What `dataclasses.asdict` made of a crash."""
        return cls(**{**value, "attempt": Attempt(**value["attempt"])})

    def named(self) -> str:
        """Which tactic, where."""
        a = self.attempt
        return f"{a.runner} tactic {a.tactic} of {a.custom_op} at {a.bucket} tokens ({self.op})"

    def told(self) -> str:
        """In words."""
        return f"{self.named()}: {self.reason}"

    def blocked(self) -> dict[str, Any]:
        """The row of the manifest's `blocked`."""
        a = self.attempt
        where = {"op": self.op, "bucket": a.bucket, "tokens": a.bucket, "entry": a.entry, "custom_op": a.custom_op}
        return {**where, "runner": a.runner, "tactic": a.tactic, "reason": self.reason}


@dataclass(frozen=True)
class RankStep:
    """A rank's last step.

    `state` is `running`, `done` or `failed`. `waiting` says that the rank is inside a collective and can only go on
    when the others arrive; `collective` counts the collectives entered so far. `op` counts from 1, 0 before the
    first; `begun` says that all ranks have met, and that silence counts from now on. `trying` is the tactic that is
    run at the moment; `returned` counts how often one came back before that, defaults and what a cache answered
    apart. `changed` is when any of this last changed.
    """

    rank: int
    pid: int
    state: str = "running"
    step: str = ""
    detail: str = ""
    op: int = 0
    begun: bool = False
    waiting: bool = False
    collective: int = 0
    trying: dict[str, Any] | None = None
    returned: int = 0
    changed: float = 0.0

    @property
    def attempt(self) -> Attempt | None:
        """The tactic that is run at the moment."""
        return None if self.trying is None else Attempt(**self.trying)

    def told(self) -> str:
        """The step in words."""
        text = f"{self.step}, {self.detail}" if self.detail else self.step
        return f"{text} (waiting for the other ranks)" if self.waiting else text


class Steps:
    """The writing side, in a rank. `path` is created whole before anything is written to it."""

    def __init__(self, path: Path, rank: int) -> None:
        path.write_bytes(b" " * _SIZE)
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), _SIZE)
        self._length = 0
        self._now = RankStep(rank, os.getpid())
        self.say("starting")

    @property
    def now(self) -> RankStep:
        """What was written last."""
        return self._now

    def say(self, step: str, detail: str = "", *, op: int | None = None) -> None:
        """Begin a step."""
        self._write(step=step[:_TEXT], detail=detail[:_TEXT], op=self._now.op if op is None else op, trying=None)

    def begin(self) -> None:
        """Say that importing and meeting are over, which have a timeout of their own."""
        self._write(begun=True)

    def tick(self, detail: str) -> None:
        """Say what is going on inside the step; proves that the rank is alive."""
        self._write(detail=detail[:_TEXT])

    def attempt(self, attempt: Attempt | None, detail: str = "") -> None:
        """Say which tactic is run now, before it is; None when it has been, and this process still is there."""
        before = self._now.trying
        if attempt is not None or before is not None:
            changes: dict[str, Any] = {"detail": detail[:_TEXT]} if detail else {}
            if before is not None and not before["entry"] and before["tactic"] != -1:
                changes["returned"] = self._now.returned + 1
            self._write(trying=None if attempt is None else attempt.fits, **changes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a collective: inside it the rank depends on the others. After an exception the mark stays."""
        self._write(waiting=True, collective=self._now.collective + 1)
        yield
        self._write(waiting=False)

    def end(self, state: str) -> None:
        """Say that the rank is `done` or `failed`."""
        self._write(state=state)

    def _write(self, **changes: Any) -> None:  # noqa: ANN401 - fields of RankStep
        self._now = replace(self._now, changed=time.monotonic(), **changes)
        # `asdict` would copy all, which takes longer than everything else here.
        text = json.dumps(vars(self._now), ensure_ascii=False).encode(errors="replace")[:_SIZE]
        size = max(len(text), self._length)  # what the last text left behind this one is blanked
        self._map[:size] = text.ljust(size)
        self._length = len(text)


def process_state(pid: int) -> str:
    """The kernel's letter for a process (R, S, D, T stopped, Z zombie), or empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def stopped(letter: str) -> bool:
    """Whether the kernel's letter is that of a process stopped by a signal or a debugger."""
    return letter in ("T", "t")


def starter() -> dict[str, str]:
    """What the environment of a process that this one starts says about its starter."""
    return {ENV_STARTER: str(os.getpid())}


def die_with_parent() -> None:
    """End with the process that started this one; at once where that has ended already.

    The kernel sends the signal to those that have asked for it. One whose starter ended before that asks too late: it
    has another parent by now.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    named = os.environ.get(ENV_STARTER, "")
    if named.isdecimal() and int(named) != os.getppid():
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel would have


def step_path(work: Path, rank: int) -> Path:
    """The step file of a rank."""
    return work / f"rank-{rank}.step.json"


def stack_path(work: Path, rank: int) -> Path:
    """Where a rank writes its stack when it receives SIGUSR1."""
    return work / f"rank-{rank}.stack.txt"


def result_path(work: Path, rank: int) -> Path:
    """Where a rank writes what it found."""
    return work / f"rank-{rank}.result.json"


def saved_path(work: Path) -> Path:
    """Where rank 0 saves the cache, and its manifest beside it."""
    return work / "saved" / CACHE_FILE


def terms_path(work: Path) -> Path:
    """Where rank 0 writes which files of an interrupted run are of no use any more."""
    return work / "terms.json"


def read_step(work: Path, rank: int) -> RankStep | None:
    """A rank's last step, or None where it has said nothing yet. A torn read is read again."""
    for _ in range(5):
        try:
            return RankStep(**json.loads(step_path(work, rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            time.sleep(0.002)
    return None
