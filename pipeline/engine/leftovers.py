"""What an engine that was killed leaves behind: processes, mounts, a bridge; found and removed.

A process belongs to a private engine when its command line names the engine's folders (dockerd, containerd, a
shim, runc) or when its root file system is a layer below them (what ran in a container or a build step).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.run import run

PROC = Path("/proc")
_PROGRAMS = {"dockerd", "containerd", "containerd-shim", "runc", "docker-proxy", "docker-init", "buildkit-runc"}


def command_line(pid: int) -> tuple[str, ...]:
    """The words of a process's command line; empty when it is gone, a zombie, or a kernel thread."""
    with contextlib.suppress(OSError):
        return tuple(os.fsdecode(w) for w in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0") if w)
    return ()


def is_running(pid: int, program: str, needle: str) -> bool:
    """Whether process `pid` is `program` and its command line contains `needle`: pids are used again."""
    words = command_line(pid)
    return bool(words) and Path(words[0]).name == program and any(needle in w for w in words[1:])


def read_pid(path: Path) -> int | None:
    """The process id in a pid file, None when there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii").strip())
    return None


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == f or path.startswith(f + "/") for f in folders)


def _lives_in(pid: int, folders: Sequence[str]) -> bool:
    """Whether the root file system of a process is an overlay whose upper layer lies below `folders`."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[4] == "/":
                options = after.split(" ", 2)[-1].split(",")
                return any(_below(o.removeprefix("upperdir="), folders) for o in options if o.startswith("upperdir="))
    return False


def processes(folders: Sequence[Path]) -> tuple[int, ...]:
    """The processes that belong to the engine whose folders these are (never our own)."""
    names = [str(f) for f in folders]
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        words = command_line(pid)
        if not words:
            continue
        program = Path(words[0]).name
        ours = program in _PROGRAMS or program.startswith("containerd-shim")
        if (ours and any(_below(w.removeprefix("unix://"), names) for w in words)) or _lives_in(pid, names):
            found.append(pid)
    return tuple(sorted(found))


def _alive(pid: int) -> bool:
    return bool(command_line(pid))


def end(pids: Sequence[int], sign: signal.Signals, patience: float) -> tuple[int, ...]:
    """Send a signal and wait up to `patience` seconds; return those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)
    deadline = time.monotonic() + patience
    left = tuple(pids)
    while left := tuple(p for p in left if _alive(p)):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return left


def mounts(folders: Sequence[Path]) -> tuple[str, ...]:
    """Mount points below `folders`, the deepest and latest first, as they must be taken off."""
    names = [str(f) for f in folders]
    found = []
    for line in (PROC / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        where = line.split()[4].encode().decode("unicode_escape")  # a space is written \040
        if _below(where, names):
            found.append(where)
    return tuple(reversed(found))


def unmount(folders: Sequence[Path]) -> None:
    """Take off every mount below `folders`, lazily: nothing of ours runs there any more."""
    for where in mounts(folders):
        run(["umount", "--lazy", where], accept=range(256), timeout=30)
