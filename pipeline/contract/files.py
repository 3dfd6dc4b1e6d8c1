"""Writing files whole or not at all, and folders in which something is made before it is renamed into its place.

No name and no process number shows whether the maker still runs: it may be in another container. A lock does. The
maker locks its folder, and the kernel drops the lock when the process ends, in whatever container that ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_PARTIAL = ".tuned-image-pipeline-"  # begins the name of a folder in which `whole_folder` makes another


def write_whole(path: Path, data: bytes, *, mode: int = 0o644) -> bool:
    """Write `data` to `path` unless it is there already; return whether anything changed.

    Compare first, then a temporary file in the same directory, fsync, `os.replace`: a reader sees the old file
    or the new one, and an unchanged file keeps its time, which keeps build caches warm. An `OSError` names `path`.
    """
    try:
        return _write_whole(path, data, mode)
    except OSError as error:
        error.filename = str(path)
        raise


def _write_whole(path: Path, data: bytes, mode: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    return True


def json_bytes(value: object) -> bytes:
    """`value` as indented JSON with a final newline."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: object, *, mode: int = 0o644) -> bool:
    """Write `value` as `json_bytes` spells it, whole or not at all."""
    return write_whole(path, json_bytes(value), mode=mode)


@contextlib.contextmanager
def alone(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Be the only one of our processes that changes what lies in `folder`; `wait` is called before waiting for another.

    The kernel drops the lock when the process ends. Where a file system has no locks, nothing is locked.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError:  # whoever reads the folder says what is wrong with it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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
        try:
            made = Path(tempfile.mkdtemp(dir=folder, prefix=prefix))
        except OSError as error:
            error.filename = str(folder)
            raise
        held = contextlib.ExitStack()
        with contextlib.suppress(OSError):
            held.enter_context(_locked(made))
    with held:
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def is_taken(out: Path) -> bool:
    """Whether something lies at a path already that is no empty directory; what `whole_folder` left does not count."""
    if not os.path.lexists(out):
        return False
    return not out.is_dir() or any(not one.name.startswith(_PARTIAL) for one in out.iterdir())


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, whose content becomes that of `out`, which is not `is_taken`; on an error `out` is as it was.

    A new directory is made beside and renamed. An empty one stays, since it may be a mount point or the current
    folder: what is to lie in it is made inside it, and moved up at the end.
    """
    stays = out.is_dir()
    with scratch(out if stays else out.parent, _PARTIAL) as work:
        made = work / "made"
        made.mkdir()
        yield made
        if not stays:
            made.rename(out)
            return
        names = sorted(one.name for one in made.iterdir())
        try:
            for name in names:
                (made / name).rename(out / name)
        except BaseException:
            for name in names:
                if not os.path.lexists(made / name):
                    (out / name).rename(made / name)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; raise `OSError` where another process has it locked, or where there are no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
