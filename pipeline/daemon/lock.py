"""One process at a time may install, start or stop the private engine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import log

from .errors import EngineBusy

_PATIENCE = 1200.0  # s; an install over a slow line takes minutes


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    return "another process"


@contextmanager
def locked(path: Path, *, patience: float = _PATIENCE) -> Iterator[None]:
    """Hold the lock file at `path`; wait up to `patience` seconds, saying once who holds it; else `EngineBusy`.

    The kernel drops the lock with its holder, so a killed process leaves none behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise EngineBusy(
            f"{path} cannot be made: {error.strerror}", hint="set XDG_CACHE_HOME to a folder on a local disk"
        ) from error
    with opened as stream:
        deadline = time.monotonic() + patience
        said = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise EngineBusy(
                        f"the engine's lock is held by {_holder(path)}", hint=f"wait for it, or end it (lock: {path})"
                    ) from None
                if not said:
                    log.note(f"waiting for {_holder(path)}, which holds {path}")
                    said = True
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} ({' '.join(sys.argv)[:200]})\n")
        stream.flush()
        try:
            yield
        finally:
            stream.truncate(0)
