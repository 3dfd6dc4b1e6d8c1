"""What can happen to ranks, and what is known of each when it does. No processes, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.errors import CacheRefused, PipelineError, UsageError, WarmUpError

from .attempt import Crash
from .rank import RankFailure
from .steps import RankStep

_STACK_LINES = 14


class RankTrouble(PipelineError):
    """Something happened to the ranks.

    `states` is what was known of each when it was found; `crashes` the tactics that did it, which can be left out;
    `stalls` the ranks that did not come back from theirs.
    """

    states: Sequence[RankState] = ()
    crashes: Sequence[Crash] = ()
    stalls: Sequence[Stall] = ()


class RankLost(RankTrouble, WarmUpError):
    """A rank's process ended without a word."""


class RankCrashed(RankTrouble, WarmUpError):
    """A tactic ended a rank's process, or its CUDA context."""


class RankStopped(RankTrouble, WarmUpError):
    """A rank's process is stopped by a signal or a debugger."""


class RankHung(RankTrouble, WarmUpError):
    """A rank did not come while the others waited for it."""


class RanksApart(RankTrouble, WarmUpError):
    """Ranks wait for each other at different places."""


class RankBroken(RankTrouble, WarmUpError):
    """A rank failed with an exception that is no expected error."""


class RankRefused(RankTrouble, WarmUpError):
    """A rank gave an expected reason to stop."""


class RankUsageRefused(RankTrouble, UsageError):
    """The same, where the plan or an option is to blame."""


class RankCacheRefused(RankTrouble, CacheRefused):
    """The same, where a cache is to blame."""


@dataclass(frozen=True)
class Stall:
    """A rank that did not come back from a tactic.

    `doubtful` says that the rank itself may be to blame: the others came back and waited for it, or it has come back
    from no tactic at all since it started and the others are not in the same one.
    """

    rank: int
    crash: Crash
    doubtful: bool


@dataclass(frozen=True)
class RankState:
    """All that is known about one rank at the moment of the diagnosis.

    `process` is the kernel's letter for the process, empty when it is gone; `status` what the launcher saw it end
    with (negative: the signal), None where it did not see an end; `place_of_end` counts those that ended before it;
    `silent` seconds since the last step changed.
    """

    rank: int
    step: RankStep | None
    process: str = ""
    silent: float = 0.0
    failure: RankFailure | None = None
    status: int | None = None
    place_of_end: int = 0
    stack: str = ""

    @property
    def place(self) -> str:
        """The last step in words."""
        if self.step is not None:
            return self.step.told()
        return "its start, before it said anything" if self.process else "never started"

    def lines(self) -> list[str]:
        """The last step and the end of the stack, for people."""
        said = f"rank {self.rank}: {self.place}, {self.silent:.1f} s ago{_state(self.process)}"
        return [said, *(f"    {line}" for line in self.trace.splitlines()[:_STACK_LINES])]

    @property
    def trace(self) -> str:
        """Where the rank was. One that failed by itself has left that place: only its own words say it."""
        return "" if self.failure else self.stack

    def to_json(self) -> dict[str, Any]:
        """What failure.json holds for this rank."""
        return {"rank": self.rank, "step": self.place, "stack": self.trace, "status": self.status}


@dataclass(frozen=True)
class Situation:
    """Every rank, why the supervisor looked (`bound` seconds where its watchdog fired), the launcher's end and last
    lines, and the names of the plan's ops. What a rank has run for `patience` seconds when the others give up on it
    does not return.
    """

    ranks: Sequence[RankState]
    bound: float | None = None
    launcher: int | None = None
    tail: Sequence[str] = field(default_factory=tuple)
    ops: Sequence[str] = ()
    patience: float = math.inf
    launcher_stopped: bool = False

    def op_of(self, step: RankStep) -> str:
        """The name of the op that a rank was at."""
        return self.ops[step.op - 1] if 0 < step.op <= len(self.ops) else ""


def _state(letter: str) -> str:
    return {"T": ", stopped", "t": ", stopped by a debugger", "Z": ", ended", "": ", ended"}.get(letter, "")
