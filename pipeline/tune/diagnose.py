"""From what each rank last said to one sentence that names the right rank. Pure: no processes, no clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.errors import CacheRefused, PipelineError, TuningError, UsageError
from pipeline.contract.exits import Exit

from .attempt import Attempt, Crash
from .causes import remedy
from .rank import RankFailure
from .steps import RankStep

_STACK_LINES = 14


class RankTrouble(PipelineError):
    """Something happened to the ranks; `states` is what was known of each when it was found."""

    states: Sequence[RankState] = ()


class RankLost(RankTrouble, TuningError):
    """A rank's process ended without a word."""


class RankCrashed(RankTrouble, TuningError):
    """A tactic ended a rank's process, or its CUDA context; `crashes` says which."""

    crashes: Sequence[Crash] = ()


class RankStopped(RankTrouble, TuningError):
    """A rank's process is stopped by a signal or a debugger."""


class RankHung(RankTrouble, TuningError):
    """A rank did not come while the others waited for it."""


class RanksApart(RankTrouble, TuningError):
    """Ranks wait for each other at different places."""


class RankBroken(RankTrouble, TuningError):
    """A rank failed with an exception that is no expected error."""


class RankRefused(RankTrouble, TuningError):
    """A rank gave an expected reason to stop."""


class _UsageRefused(RankTrouble, UsageError):
    """The same, where the plan or an option is to blame."""


class _CacheRefused(RankTrouble, CacheRefused):
    """The same, where a cache is to blame."""


@dataclass(frozen=True)
class RankState:
    """All that is known about one rank at the moment of the diagnosis.

    `process` is the kernel's letter for the process, empty when it is gone; `status` what the launcher saw it end
    with (negative: the signal), None where it did not see an end; `silent` seconds since the last step changed.
    """

    rank: int
    step: RankStep | None
    process: str = ""
    silent: float = 0.0
    failure: RankFailure | None = None
    status: int | None = None
    stack: str = ""

    @property
    def place(self) -> str:
        """The last step in words."""
        return self.step.told() if self.step is not None else "never started"

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
    lines, and the names of the plan's ops.
    """

    ranks: Sequence[RankState]
    bound: float | None = None
    launcher: int | None = None
    tail: Sequence[str] = field(default_factory=tuple)
    ops: Sequence[str] = ()


def _state(letter: str) -> str:
    return {"T": ", stopped", "t": ", stopped by a debugger", "Z": ", ended", "": ", ended"}.get(letter, "")


def diagnose(now: Situation) -> RankTrouble:
    """The error to raise for a failed run, with every rank's state."""
    error = _diagnose(now)
    error.states = tuple(now.ranks)
    return error


def _diagnose(now: Situation) -> RankTrouble:
    """Find the rank to name.

    In this order: an expected error of a rank; a tactic that ended one; a rank that is gone or stopped, which outranks
    the timeouts that it causes elsewhere; an unexpected exception; ranks that are waited for.
    """
    details = [line for state in now.ranks for line in state.lines()]
    refused = [s for s in now.ranks if s.failure and s.failure.kind == "refused"]
    if refused:
        return _refusal(refused, now)
    crashed = [s for s in now.ranks if _crashed(s)]
    if crashed:
        return _crash(crashed, now, details)
    killed = [s for s in now.ranks if s.status is not None and s.status < 0 and s.status != -signal.SIGTERM]
    gone = killed or [s for s in now.ranks if s.step and not s.process and not s.failure and s.step.state == "running"]
    if gone:
        how = f"was ended by {_signal(gone[0].status)}" if gone[0].status else "ended without a word"
        hint = "nothing was saved; SIGKILL often means that the machine ran out of memory"
        bus = (
            ["bus error: shared memory"] if gone[0].status == -signal.SIGBUS else []
        )  # a page of /dev/shm that is full
        hint = remedy([*bus, *now.tail], hint)
        return RankLost(f"rank {gone[0].rank} {how} at: {gone[0].place}", details=[*now.tail, *details], hint=hint)
    stopped = [s for s in now.ranks if s.process in ("T", "t")]
    if stopped:
        how = "nothing was saved; it was stopped from outside (SIGSTOP, a debugger, a frozen container)"
        return RankStopped(f"rank {stopped[0].rank} is stopped at: {stopped[0].place}", details=details, hint=how)
    broken = [s for s in now.ranks if s.failure and s.failure.kind == "bug"]
    if broken:
        failure = broken[0].failure
        assert failure is not None
        return RankBroken(
            f"rank {broken[0].rank} failed at: {broken[0].place}: {failure.message}",
            details=[*failure.details, *details],
            hint=remedy(
                [failure.message, *failure.details, *now.tail], "nothing was saved; the details are its traceback"
            ),
        )
    return _waiting(now, details)


def _crashed(state: RankState) -> bool:
    """Whether a rank ended by itself while it ran a tactic; who is killed or told to end does not."""
    if state.step is None or state.step.trying is None:
        return False
    if state.failure is not None:
        return state.failure.kind == "device"
    return not state.process and state.status not in (None, 0, -signal.SIGKILL, -signal.SIGTERM)


def _crash(crashed: Sequence[RankState], now: Situation, details: Sequence[str]) -> RankCrashed:
    crashes: dict[bytes, Crash] = {}
    for state in crashed:
        assert state.step is not None
        assert state.step.trying is not None
        attempt = Attempt(**state.step.trying)
        if state.failure is not None:
            how = f"the GPU of rank {state.rank} takes no more work: {state.failure.message}"
        elif state.status is not None and state.status < 0:
            how = f"rank {state.rank} was ended by {_signal(state.status)}"
        else:
            how = f"rank {state.rank} ended with {state.status}"
        place = now.ops[state.step.op - 1] if 0 < state.step.op <= len(now.ops) else ""
        crashes.setdefault(attempt.identity, Crash(place, attempt, how))
    error = RankCrashed(
        f"a tactic ended its rank: {next(iter(crashes.values())).told()}",
        details=[*now.tail, *details],
        hint="nothing was saved; leave the op out with --skip-ops, and report the tactic to FlashInfer",
    )
    error.crashes = tuple(crashes.values())
    return error


def _refusal(refused: Sequence[RankState], now: Situation) -> RankTrouble:
    failure = refused[0].failure
    assert failure is not None
    kinds: dict[int, type[RankTrouble]] = {Exit.USAGE: _UsageRefused, Exit.CACHE: _CacheRefused}
    everywhere = len(refused) == len(now.ranks) and len({s.failure.message for s in refused if s.failure}) == 1
    about = "" if everywhere or f"rank {refused[0].rank} " in failure.message else f"rank {refused[0].rank}: "
    return kinds.get(failure.exit_code, RankRefused)(
        about + failure.message, details=failure.details, hint=failure.hint
    )


def _waiting(now: Situation, details: list[str]) -> RankTrouble:
    """Nobody failed by itself: somebody is waited for."""
    started = [s for s in now.ranks if s.step is not None]
    silent = f" for {now.bound:.0f} s" if now.bound is not None else ""
    if not started:
        return RankBroken(
            "no rank started" + (f" within {now.bound:.0f} s" if now.bound is not None else ""),
            details=[*now.tail, *details],
            hint="the details are the launcher's last lines",
        )
    missing = [s for s in now.ranks if s.step is None]
    active = [s for s in started if s.step and not s.step.waiting and s.step.state == "running"]
    late = missing or sorted(active, key=lambda s: -s.silent)
    if late:
        what = "never started" if late[0].step is None else f"made no progress{silent} at: {late[0].place}"
        return RankHung(
            f"rank {late[0].rank} {what}; the other ranks waited for it",
            details=details,
            hint="nothing was saved; its stack is among the details; a longer --timeout helps only a slow rank",
        )
    behind = min(started, key=lambda s: (s.step.collective if s.step else 0, s.rank))
    ahead = max(started, key=lambda s: s.step.collective if s.step else 0)
    if behind.step and ahead.step and behind.step.collective != ahead.step.collective:
        return RanksApart(
            f"rank {behind.rank} waits in its collective {behind.step.collective} at: {behind.place}; "
            f"rank {ahead.rank} is at collective {ahead.step.collective}",
            details=details,
            hint="nothing was saved; the ranks did not take the same steps",
        )
    said = next((s.failure.message for s in now.ranks if s.failure), "")
    return RankHung(
        f"the ranks wait for each other{silent} at: {behind.place}" + (f" ({said})" if said else ""),
        details=[*details, *now.tail],
        hint="nothing was saved; the ranks reached the same place and could not talk to each other",
    )


def _signal(status: int | None) -> str:
    try:
        return signal.Signals(-(status or 0)).name
    except ValueError:
        return f"signal {-(status or 0)}"
