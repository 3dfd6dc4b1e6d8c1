"""How our own engine is, looked at without changing anything and without importing what starts it."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .facts import Engine
from .finding import find
from .places import Places, places
from .procs import running_pid


def store(at: Places) -> str:
    """The image store that this engine was last started with; `classic` before the first start."""
    import json

    with contextlib.suppress(OSError, ValueError, AttributeError):
        features = json.loads(at.config.read_text(encoding="utf-8")).get("features", {})
        return "containerd" if features.get("containerd-snapshotter") else "classic"
    return "classic"


@dataclass(frozen=True)
class PrivateState:
    """Our own engine: where it lies, whether it runs, how much it holds (bytes; at least, when not `complete`)."""

    host: str
    root: str
    log: str
    store: str
    pid: int | None
    bytes: int
    complete: bool


@dataclass(frozen=True)
class Status:
    """The engine that would be used, None when none answers, and the state of our own."""

    engine: Engine | None
    private: PrivateState


def status(*, budget: float = 0.005) -> Status:
    """Look without changing anything; the private engine's size is counted for at most `budget` seconds."""
    at = places()
    size, complete = _size(at.root, budget)
    own = PrivateState(
        host=at.host,
        root=str(at.root),
        log=str(at.log),
        store=store(at),
        pid=running_pid(at),
        bytes=size,
        complete=complete,
    )
    return Status(find(), own)


def _size(root: Path, budget: float) -> tuple[int, bool]:
    """Bytes on disk below `root`, without what is mounted there; False when the time was up."""
    deadline = time.monotonic() + budget
    total = 0
    try:
        device = root.stat().st_dev
    except OSError:
        return 0, True
    folders = [str(root)]
    while folders:
        if time.monotonic() > deadline:
            return total, False
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    state = entry.stat(follow_symlinks=False)
                    if state.st_dev != device:
                        continue
                    total += state.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # a folder that went away, or that is not ours to read
            continue
    return total, True
