"""From what each rank last said to one sentence that names the right rank. Pure: no processes, no clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from pipeline.contract.exits import Exit

from . import blame
from .causes import remedy
from .processes import stopped
from .troubles import (
    RankBroken,
    RankCacheRefused,
    RankHung,
    RankLost,
    RankRefused,
    RanksApart,
    RankState,
    RankStopped,
    RankTrouble,
    RankUsageRefused,
    Situation,
    Stall,
)


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
    crashed = [s for s in now.ranks if blame.crashed(s)]
    if crashed:
        return blame.crash(crashed, now, details)
    lost = _lost(now, details)
    if lost:
        return lost
    held = [s for s in now.ranks if stopped(s.process)]
    unmade = now.launcher_stopped and any(s.step is None for s in now.ranks)
    if held or unmade:
        what = f"rank {held[0].rank} is stopped at: {held[0].place}" if held else "the launcher of the ranks is stopped"
        how = "nothing was saved; it was stopped from outside (SIGSTOP, a debugger, a frozen container)"
        return RankStopped(what, details=details, hint=how)
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


def _lost(now: Situation, details: list[str]) -> RankLost | None:
    """A rank that is gone; the launcher, where it was ended and they with it."""
    hint = "nothing was saved; SIGKILL often means that the machine ran out of memory"
    ranks = sorted(now.ranks, key=lambda s: s.place_of_end)  # the launcher ends the others, with SIGTERM
    killed = [s for s in ranks if s.status is not None and s.status < 0 and s.status != -signal.SIGTERM]
    if now.launcher is not None and now.launcher < 0 and not killed:
        how = f"the launcher of the ranks was ended by {blame.signal_name(now.launcher)}"
        return RankLost(f"{how} at: {now.ranks[0].place}", details=[*now.tail, *details], hint=hint)
    gone = killed or [s for s in ranks if s.step and not s.process and not s.failure and s.step.state != "done"]
    if not gone:
        return None
    status = gone[0].status or 0
    how = f"was ended by {blame.signal_name(status)}" if status < 0 else "ended without a word"
    how += f", with {status}" if status > 0 else ""
    # A page of /dev/shm that is full ends who touches it.
    bus = ["bus error: shared memory"] if gone[0].status == -signal.SIGBUS else []
    return RankLost(
        f"rank {gone[0].rank} {how} at: {gone[0].place}",
        details=[*now.tail, *details],
        hint=remedy([*bus, *now.tail], hint),
    )


def _refusal(refused: Sequence[RankState], now: Situation) -> RankTrouble:
    failure = refused[0].failure
    assert failure is not None
    kinds: dict[int, type[RankTrouble]] = {Exit.USAGE: RankUsageRefused, Exit.CACHE: RankCacheRefused}
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
        return _late(late[0], now, () if missing else blame.stalls(now, active), details)
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


def _late(one: RankState, now: Situation, stalls: Sequence[Stall], details: list[str]) -> RankHung:
    """The error for a rank that the others waited for, and the tactics that it and others are inside of."""
    silent = f" for {now.bound:.0f} s" if now.bound is not None else ""
    what = "never started" if one.step is None else f"made no progress{silent} at: {one.place}"
    where = next((f", in {stall.crash.named()}" for stall in stalls if stall.rank == one.rank), "")
    error = RankHung(
        f"rank {one.rank} {what}{where}; the other ranks waited for it",
        details=details,
        hint="nothing was saved; its stack is among the details; a longer --timeout helps only a slow rank",
    )
    error.stalls = tuple(stalls)
    error.crashes = tuple({stall.crash.attempt.identity: stall.crash for stall in reversed(stalls)}.values())
    return error
