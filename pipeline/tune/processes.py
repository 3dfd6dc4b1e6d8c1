"""What the kernel says of processes: whether they run, are stopped, and who started them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Unheard:
    """The process of a rank that has said nothing yet, and the kernel's letter for it."""

    rank: int
    pid: int
    started: str
    letter: str


def process_state(pid: int) -> str:
    """The kernel's letter for a process (R, S, D, T stopped, Z zombie), or empty where there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> str:
    """When the kernel started a process, in its own ticks; empty where there is none."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def lives(pid: int, started: str) -> bool:
    """Whether the process of this pid and start time still runs."""
    return bool(letter_of(pid, started))


def letter_of(pid: int, started: str) -> str:
    """The letter of a process that runs, from one look: at a second one its pid may be somebody else's."""
    fields = _stat(pid)
    return fields[0] if len(fields) > 19 and fields[19] == started and fields[0] not in ("Z", "X") else ""


def stopped(letter: str) -> bool:
    """Whether the kernel's letter is that of a process stopped by a signal or a debugger."""
    return letter in ("T", "t")


def unheard_of(starters: Collection[int], ranks: Collection[int], *, launched: bool) -> list[Unheard]:
    """The processes of `ranks`, told by RANK in their environment: those that `starters` started, or with
    `launched=False` these themselves.

    For ranks that have not written their steps yet; one that was made and does not run its own program yet is not among
    them.
    """
    found = []
    for pid in _children(starters) if launched else starters:
        fields, rank = _stat(pid), _variable(pid, "RANK")
        if len(fields) > 19 and fields[0] not in ("Z", "X") and rank.isdecimal() and int(rank) in ranks:
            found.append(Unheard(int(rank), pid, fields[19], fields[0]))
    return found


def kill(pid: int, started: str) -> None:
    """SIGKILL a process, unless its pid has gone to somebody else."""
    if lives(pid, started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _children(starters: Iterable[int]) -> Iterator[int]:
    """Whom these have started; nobody where the kernel was built without such lists (CONFIG_PROC_CHILDREN)."""
    for starter in starters:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for listed in Path("/proc", str(starter), "task").glob("*/children"):  # of each thread
                yield from map(int, listed.read_text().split())


def _variable(pid: int, name: str) -> str:
    """A variable of the environment that a process was started with; empty where it has none."""
    wanted = f"{name}=".encode()
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(wanted):
                return one[len(wanted) :].decode(errors="replace")
    return ""


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
