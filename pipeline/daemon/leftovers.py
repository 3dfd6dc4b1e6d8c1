"""What an engine that was killed leaves behind: processes, mounts, a bridge; found and removed.

A process belongs to a private engine when its command line names the engine's folders (dockerd, containerd, a
shim, runc) or when its root file system is a layer below them (what ran in a container or a build step).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.run import run

from .procs import PROC, alive, all_pids, command_line, parent

_PROGRAMS = {
    "dockerd",
    "containerd",
    "containerd-shim",
    "runc",
    "docker-proxy",
    "docker-init",
    "start-stop-daemon",
    "buildkit-runc",
}


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == f or path.startswith(f + "/") for f in folders)


def _unescaped(field: bytes) -> str:
    """A path of mountinfo, where a space is written \\040 and so on (proc(5))."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field))


def _lives_in(pid: int, folders: Sequence[str]) -> bool:
    """Whether the root file system of a process is an overlay whose upper layer lies below `folders`."""
    with contextlib.suppress(OSError, IndexError):
        for line in (PROC / str(pid) / "mountinfo").read_bytes().splitlines():
            before, _, after = line.partition(b" - ")
            if before.split()[4] == b"/":
                options = after.split(b" ", 2)[2].split(b",")
                uppers = [_unescaped(o.removeprefix(b"upperdir=")) for o in options if o.startswith(b"upperdir=")]
                return any(_below(upper, folders) for upper in uppers)
    return False


def processes(folders: Sequence[Path]) -> tuple[int, ...]:
    """The processes that belong to the engine whose folders these are, and all that they started; never our own."""
    names = [str(f) for f in folders]
    found: set[int] = set()
    pids = all_pids()
    for pid in pids:
        words = command_line(pid)
        if words:
            ours = Path(words[0]).name in _PROGRAMS or Path(words[0]).name.startswith("containerd-shim")
            if (ours and any(_below(w.removeprefix("unix://"), names) for w in words)) or _lives_in(pid, names):
                found.add(pid)
    parents = {pid: parent(pid) for pid in pids}
    while more := {pid for pid in pids if parents[pid] in found} - found:
        found |= more
    return tuple(sorted(found - {os.getpid()}))


def end(pids: Sequence[int], sign: signal.Signals, patience: float) -> tuple[int, ...]:
    """Send a signal and wait up to `patience` seconds; return those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
    deadline = time.monotonic() + patience
    left = tuple(pids)
    while left := tuple(p for p in left if alive(p)):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return left


def mounts(folders: Sequence[Path]) -> tuple[str, ...]:
    """Mount points below `folders`, the deepest and latest first, as they must be taken off."""
    names = [str(f) for f in folders]
    points = (_unescaped(line.split()[4]) for line in (PROC / "self" / "mountinfo").read_bytes().splitlines())
    return tuple(reversed([where for where in points if _below(where, names)]))


def unmount(folders: Sequence[Path]) -> None:
    """Take off every mount below `folders`, lazily: nothing of ours runs there any more."""
    for where in mounts(folders):
        run(["umount", "--lazy", where], accept=range(256), timeout=30)
