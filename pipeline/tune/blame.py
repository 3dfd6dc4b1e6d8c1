"""Which tactics did it: those that ended their rank, and those that did not return. Pure, as `diagnose`, which asks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from .attempt import Attempt, Crash
from .troubles import RankCrashed, RankState, Situation, Stall


def signal_name(status: int | None) -> str:
    """The name of the signal in a process's end."""
    try:
        return signal.Signals(-(status or 0)).name
    except ValueError:
        return f"signal {-(status or 0)}"


def crashed(state: RankState) -> bool:
    """Whether a rank ended by itself while it ran a tactic; who is killed or told to end does not."""
    if state.step is None or state.step.trying is None:
        return False
    if state.failure is not None:
        return state.failure.kind == "device"
    return not state.process and state.status not in (None, 0, -signal.SIGKILL, -signal.SIGTERM)


def crash(found: Sequence[RankState], now: Situation, details: Sequence[str]) -> RankCrashed:
    """The error for ranks that `crashed`."""
    crashes: dict[bytes, Crash] = {}
    for state in found:
        if state.failure is not None:
            how = f"the GPU of rank {state.rank} takes no more work: {state.failure.message}"
        elif state.status is not None and state.status < 0:
            how = f"rank {state.rank} was ended by {signal_name(state.status)}"
        else:
            how = f"rank {state.rank} ended with {state.status}"
        one = _blamed(state, now, how)
        for suspect in one.attempt.suspects:
            crashes.setdefault(suspect.identity, Crash(one.op, suspect, how))
    error = RankCrashed(
        f"a tactic ended its rank: {next(iter(crashes.values())).told()}",
        details=[*now.tail, *details],
        hint="nothing was saved; leave the op out with --skip-ops, and report the tactic to FlashInfer",
    )
    error.crashes = tuple(crashes.values())
    return error


def stalls(now: Situation, active: Sequence[RankState]) -> tuple[Stall, ...]:
    """The ranks that are inside a tactic which does not return; `active` are those that run and wait for nobody.

    None where the bound has not passed, or where one of the ranks that are late names no tactic: it is that rank which
    the others wait for.
    """
    given_up = any(state.failure is not None and state.failure.kind == "collective" for state in now.ranks)
    late = [state for state in active if state.silent >= now.patience]
    if not (given_up or now.bound is not None) or any(_trying(state) is None for state in late):
        return ()
    same = {attempt.identity for state in late if (attempt := _trying(state)) is not None}
    everywhere = len(late) == len(now.ranks) > 1 and len(same) == 1  # on one rank alone it may be the rank
    return tuple(
        Stall(
            state.rank,
            _blamed(state, now, f"did not return within {int(state.silent)} s on rank {state.rank}"),
            doubtful=given_up or (not everywhere and state.step is not None and state.step.returned == 0),
        )
        for state in late
    )


def _trying(state: RankState) -> Attempt | None:
    return None if state.step is None or state.step.trying is None else Attempt(**state.step.trying)


def _blamed(state: RankState, now: Situation, how: str) -> Crash:
    attempt = _trying(state)
    assert attempt is not None
    assert state.step is not None
    return Crash(now.op_of(state.step), attempt, how)
