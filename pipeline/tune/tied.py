"""A process that ends with the one that started it, however that one ends.

The kernel sends the signal to those that have asked for it; who was started shortly before its starter was ended asks
too late, and finds out by looking. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from .processes import lives, start_time

ENV_STARTER = "PIPELINE_TUNE_STARTER"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def starter() -> dict[str, str]:
    """What the environment of a process that we start says about us: pid, and when the kernel started it."""
    return {ENV_STARTER: f"{os.getpid()} {start_time(os.getpid())}"}


def tie() -> None:
    """End with the process that started this one; at once where it is gone already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pid, _, started = os.environ.get(ENV_STARTER, "").partition(" ")
    if pid.isdecimal() and not lives(int(pid), started):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel would have
