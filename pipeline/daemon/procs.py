"""Reading /proc: which program a process id stands for, and whether our own engine's two run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .places import Places

PROC = Path("/proc")


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


def all_pids() -> tuple[int, ...]:
    """The ids of all processes, ascending."""
    return tuple(sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()))


def _stat(pid: int) -> tuple[str, ...]:
    """The fields of /proc/PID/stat from the state on (proc(5)); empty when the process is gone."""
    with contextlib.suppress(OSError):
        # The field before, the name, is in parentheses and may hold anything.
        return tuple((PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split())
    return ()


def parent(pid: int) -> int:
    """The id of a process's parent, 0 when the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not. (A command line does not tell: it is empty during an exec.)"""
    return _stat(pid)[:1] not in {(), ("Z",), ("X",)}


def running_pid(at: Places) -> int | None:
    """dockerd's process id, None when it does not run (a stale pid file counts as not running)."""
    pid = read_pid(at.pid_file)
    return pid if pid is not None and is_running(pid, "dockerd", str(at.config)) else None


def containerd_pid(at: Places) -> int | None:
    """containerd's process id, None when it does not run."""
    pid = read_pid(at.containerd_pid_file)
    return pid if pid is not None and is_running(pid, "containerd", str(at.containerd_config)) else None
