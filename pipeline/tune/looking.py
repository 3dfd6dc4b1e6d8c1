"""Asking ranks from outside what they do, and ending them. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .processes import Unheard, kill, stopped, unheard_of
from .rank import read_failure, stack_path
from .steps import RankStep, alive, read_step, state_of
from .troubles import RankState

_POLL = 0.1
_STACKS = 10.0  # seconds to wait for stacks
_GONE = 10.0  # seconds to wait for ranks that were ended, whose devices take a while to give their memory back


class Stops:
    """For how long processes have been stopped, by a signal or a debugger, each time that they were looked at.

    `longest` is that of the one which is stopped now and has been for longest; `all_told` the time in which any was.
    Seconds.
    """

    def __init__(self) -> None:
        self.longest = self.all_told = 0.0
        self._since: dict[int, float] = {}
        self._before = 0.0

    def see(self, letters: Mapping[int, str], now: float) -> None:
        """Note the kernel's letter for each process, by whatever number tells them apart."""
        found = {number for number, letter in letters.items() if stopped(letter)}
        if self._since:
            self.all_told += now - self._before
        self._since = {number: self._since.get(number, now) for number in found}
        self._before = now
        self.longest = max((now - since for since in self._since.values()), default=0.0)


def silent(work: Path, ranks: Sequence[int], started: Sequence[int], launched: bool) -> list[Unheard]:
    """The ranks that run and have said nothing yet; `started` and `launched` as in `processes.unheard`."""
    unsaid = [rank for rank in ranks if read_step(work, rank) is None]
    return unheard_of(started, unsaid, launched=launched) if unsaid else []


def end_silent(work: Path, ranks: Sequence[int], started: Sequence[int], launched: bool) -> None:
    """SIGKILL them."""
    for one in silent(work, ranks, started, launched):
        kill(one.pid, one.started)


def look(
    work: Path, ranks: Sequence[int], *, launcher: bool = True, unheard: Sequence[Unheard] = ()
) -> list[RankState]:
    """Ask every living rank for its stack and collect what is known of each. A stopped rank is woken to answer.

    `launcher` says that there is one which will tell how ranks ended. `unheard` are those that have said nothing yet,
    and so have nothing to answer with.
    """
    steps = {rank: read_step(work, rank) for rank in ranks}
    now = time.monotonic()
    processes = {rank: state_of(step) for rank, step in steps.items()}
    for rank, step in steps.items():
        if step is not None and processes[rank]:
            _signal(step, signal.SIGUSR1)
            if stopped(processes[rank]):
                _signal(step, signal.SIGCONT)
    asked = [rank for rank, letter in processes.items() if letter]
    # A rank that is gone without a word is explained by the launcher, once it has ended the others.
    quiet = launcher and any(
        s and not processes[r] and s.state == "running" and not read_failure(work, r) for r, s in steps.items()
    )

    seen: list[str] = []

    def missing() -> bool:
        """A stack that is still being written may lack its last thread: it is there once it grows no more."""
        spent, before = time.monotonic() - now, seen[:]
        seen[:] = [_stack(work, rank) for rank in asked]
        return (spent < _STACKS and (not all(seen) or seen != before)) or (
            spent < _GONE and quiet and not _launcher_saw(work)
        )

    while missing():
        time.sleep(_POLL)
    ended = _launcher_saw(work)
    letters = {one.rank: one.letter for one in unheard}
    order = list(ended)
    return [
        RankState(
            rank=rank,
            step=step,
            process=processes[rank] or letters.get(rank, ""),
            silent=max(0.0, now - step.changed) if step else 0.0,
            failure=read_failure(work, rank),
            status=ended.get(rank),
            place_of_end=order.index(rank) if rank in ended else len(order),
            stack=_main_first(_stack(work, rank)),
        )
        for rank, step in steps.items()
    ]


def _stack(work: Path, rank: int) -> str:
    try:
        return stack_path(work, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _main_first(stack: str) -> str:
    """faulthandler writes a process's threads from the newest to the oldest, which is the one that works."""
    return "\n\n".join(reversed(stack.strip().split("\n\n")))


def _launcher_saw(work: Path) -> dict[int, int]:
    """How each rank ended, the first to end first."""
    try:
        return {int(one["rank"]): int(one["status"]) for one in json.loads((work / "launcher.json").read_bytes())}
    except (OSError, ValueError):
        return {}


def end(work: Path, ranks: Sequence[int]) -> None:
    """SIGKILL every rank that still runs: torchrun gives each a session of its own and would wait 30 s for it.

    Waits for them to be gone: a driver that takes a kernel off its device does so before the process ends.
    """
    steps = [step for rank in ranks if (step := read_step(work, rank)) is not None]
    for step in steps:
        kill(step.pid, step.started)
    deadline = time.monotonic() + _GONE
    while any(alive(step) for step in steps) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _signal(step: RankStep, number: signal.Signals) -> None:
    if alive(step):  # the pid has not gone to somebody else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(step.pid, number)
