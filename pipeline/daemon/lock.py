"""Locks between processes: the kernel releases them with their holder, so a killed process leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline import log
from pipeline.contract.errors import DockerError, PipelineError, WarmUpError


@contextmanager
def locked(path: Path, what: str, *, wait: float = 1200.0, error: type[PipelineError] = DockerError) -> Iterator[None]:
    """Hold the lock file at `path`; `what` names in words what it guards.

    Waits up to `wait` seconds and says once who holds the lock (process id, command, since when); raises `error` after
    that, or when the file cannot be created. One process may hold a lock once only.
    """
    # Any user may wait for the lock of another: the file is readable and writable by all.
    lock = FileLock(path, mode=0o666)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.note(f"waiting up to {wait:.0f} s for {_holder(path)}, which uses {what}")
            lock.acquire(timeout=wait, poll_interval=0.1)
    except Timeout:
        raise error(f"{what} is in use by {_holder(path)}", hint=f"wait for it or stop it (lock: {path})") from None
    except OSError as problem:
        raise error(f"the lock {path} cannot be created: {problem.strerror}", hint="check its permissions") from problem
    try:
        _sign(path)
        yield
    finally:
        lock.release()


def _sign(path: Path) -> None:
    """Write who holds the lock. The command's first words only: later ones may hold a secret."""
    words = [Path(sys.argv[0]).name, *(w for w in sys.argv[1:] if re.fullmatch(r"[\w./-]+", w) and w[0] != "-")]
    holder = {"pid": os.getpid(), "command": " ".join(words[:3]), "since": datetime.now().strftime("%F %T")}
    with contextlib.suppress(OSError):
        # Neither created nor followed: in a folder that all may write to, a link could lead anywhere.
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(holder, stream)
            with contextlib.suppress(PermissionError):  # the file of another user, who did this
                os.fchmod(handle, 0o666)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {found['pid']} ({found['command']}, since {found['since']})"
    return "another process"


def _lock_folder() -> Path:
    """A folder that all users of this machine share, so that checkouts, cache folders and users see one lock."""
    shared = Path("/run/lock")
    try:
        return shared if shared.stat().st_mode & stat.S_IWOTH else Path("/tmp")  # noqa: S108 - links are not followed
    except OSError:
        return Path("/tmp")  # noqa: S108


@contextmanager
def device_lock(
    devices: Sequence[str], *, machine: str = "", wait: float = 3600.0, folder: Path | None = None
) -> Iterator[None]:
    """Be the only process that times kernels on `devices`: GPU UUIDs or indexes, or `cpu`.

    `machine` is the engine's `name` when the engine runs elsewhere. Waits up to `wait` seconds for all devices
    together, says who holds one, and raises `WarmUpError` after that. Two runs must name a device the same way.
    """
    with ExitStack() as stack:
        for device in sorted(set(devices)):  # one order for all, so that two runs never wait for each other
            name = re.sub(r"[^\w.-]", "_", f"{machine}-{device}" if machine else device)
            path = (folder or _lock_folder()) / f"tuned-image-pipeline-{name}.lock"
            what = "the CPU" if device == "cpu" else f"GPU {device}"
            stack.enter_context(locked(path, what, wait=wait, error=WarmUpError))
        yield
