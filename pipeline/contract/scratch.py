"""Folders in which something is made before it is renamed into its place, and what is left of them after a SIGKILL.

No name and no process number shows whether the maker still runs: it may be in another container. A lock does. The
maker locks its folder, and the kernel drops the lock when the process ends, in whatever container that ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import alone


@contextlib.contextmanager
def scratch(folder: Path, prefix: str, rescue: Callable[[Path], None] = lambda _: None) -> Iterator[Path]:
    """A new folder in `folder`, removed on the way out with what is still in it. Raises `OSError`.

    Those with this prefix whose makers are gone are removed first; `rescue` is given each before, and one with which
    it fails stays. Where a file system knows no locks nothing is removed, since nobody can say there who is gone.
    """
    with alone(folder, lambda: None):  # nobody looks between the making of a folder and its lock
        for left in sorted(folder.glob(f"{prefix}*")):
            with contextlib.suppress(OSError), _locked(left):  # locked by its maker, or not a folder of this kind
                rescue(left)
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(dir=folder, prefix=prefix))
        held = contextlib.ExitStack()
        with contextlib.suppress(OSError):
            held.enter_context(_locked(made))
    with held:
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; raise `OSError` where another process has it locked, or where there are no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
