"""What the kernel says of a process, and processes that end with the one that started them. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

ENV_STARTER = "PIPELINE_TUNE_STARTER"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
