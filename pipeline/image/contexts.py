"""Named build contexts, staged on disk: the same content gives the same bytes, times and modes, hence the same layer.

A context that becomes a linked layer holds the whole path from `/`. Its directories then replace those of the base: so
they get the modes that the base's have (`Destination`), and a path that leads through a symbolic link of the base is
resolved first.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_bytes, sha256_file, sha256_json
from pipeline.contract.files import scratch

# The image's own dates are this (2020-01-01): any fixed time would do, but zip dislikes 1970.
FIXED_TIME = 1_577_836_800
# What is staged carries a time within the four years after it, chosen by its content: files by their bytes, directories
# by all that lies in them. BuildKit synchronises a local context by path, size, mode and time into a folder that it
# kept from an earlier build. With one time for everything it baked the old bytes of a file of the same size, and
# left "now" on a directory in which something else had changed (both seen). One time per content is as reproducible.
_SPREAD = 1 << 27
_STAGING = 6  # raise when staging itself changes, so that contexts staged earlier are not used

PACKAGE = Path(__file__).resolve().parent.parent
_IN_IMAGE = ("contract", "flashinfer", "cache", "start")
_IN_TUNER = ("contract", "flashinfer", "cache", "tune", "log.py", "run.py")


@dataclass(frozen=True)
class Destination:
    """Where a path of the image lies in a base: `path` without symbolic links, and the base's own directories above.

    `parents` are (path, mode, uid, gid) of the directories that exist, the highest first.
    """

    path: str
    parents: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def linked(self) -> bool:
        """Whether a linked layer may bring these directories: it makes them root's."""
        return all(uid == gid == 0 for _, _, uid, gid in self.parents)

    def modes(self) -> dict[str, int]:
        """Modes by path relative to `/`."""
        return {path.lstrip("/"): mode for path, mode, _, _ in self.parents}


def settle(
    root: Path, *, modes: Mapping[str, int] | None = None, keep_times: bool = False, writable: bool = False
) -> Path:
    """Give everything below `root` plain modes, and times that its content decides; return `root`.

    Directories become 0755, files 0644, or 0755 when their owner may execute them; `writable`: 0777 and 0666, for a
    server that writes beside them. `modes` are those of single directories, by their path below `root`. `keep_times`
    leaves the times of files, for a reader that compares them.
    """
    times: dict[str, int] = {}
    chosen = modes or {}
    more = 0o022 if writable else 0
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*files, *names):
            path = Path(folder) / name
            place = str(path.relative_to(root))
            above = any(one == place or one.startswith(f"{place}/") for one in chosen)
            _settle_one(path, times, keep_times=keep_times, more=0 if above else more, mode=chosen.get(place))
    _settle_one(root, times, keep_times=keep_times, more=0, mode=None)
    return root


def _settle_one(path: Path, times: dict[str, int], *, keep_times: bool, more: int, mode: int | None) -> None:
    """Settle one file, link or directory whose inside is settled; `times` holds what was given to each path so far."""
    if path.is_symlink():
        content = sha256_bytes(os.fsencode(path.readlink()))
    elif path.is_dir():
        content = sha256_json(sorted((child.name, times[str(child)]) for child in path.iterdir()))
        path.chmod((0o755 | more) if mode is None else mode)
    else:
        path.chmod((0o755 if path.stat().st_mode & 0o100 else 0o644) | more)
        if keep_times:
            times[str(path)] = path.stat().st_mtime_ns
            return
        content = sha256_file(path)
    when = times[str(path)] = FIXED_TIME + int(content[:8], 16) % _SPREAD
    os.utime(path, (when, when), follow_symlinks=False)


@dataclass(frozen=True)
class Staging:
    """The folder of staged contexts below the cache home."""

    home: Path

    @property
    def folder(self) -> Path:
        """Where contexts lie."""
        return self.home / "contexts"

    def make(self, name: str, content: object, make: Callable[[Path], Path]) -> Path:
        """The context `name` made from `content`: made beside its place and renamed into it, or there already."""
        place = self.folder / f"{name}-{sha256_json([_STAGING, content])[:24]}"
        if place.is_dir():
            os.utime(place)  # `pipeline clean` removes what was not used for long
            return place
        self.folder.mkdir(parents=True, exist_ok=True)
        with scratch(self.folder, ".context-") as temporary:
            made = make(temporary / "made")
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # another run staged the same
                    raise
            os.utime(place)
        return place

    def code(self, where: Destination) -> Path:
        """What the finished image carries: the entry point, and the package that only it finds."""

        def make(place: Path) -> Path:
            code = place / where.path.lstrip("/")
            _copy_package(code / "lib" / "pipeline", _IN_IMAGE)
            (code / "bin").mkdir()
            shutil.copyfile(PACKAGE / "start" / "pipeline-run", code / "bin" / "pipeline-run")
            (code / "bin" / "pipeline-run").chmod(0o755)
            return settle(place, modes=where.modes())

        return self.make("code", [where.path, where.parents, package_content(_IN_IMAGE)], make)

    def tuner(self, files: Mapping[str, bytes]) -> Path:
        """What the tuner image carries beside: the tuner's package, its launcher, and `files` (plan.json)."""

        def make(place: Path) -> Path:
            tuner_into(place)
            for name, data in files.items():
                (place / name).write_bytes(data)
            return settle(place)

        content = {name: sha256_bytes(data) for name, data in files.items()}
        return self.make("tuner", [tuner_content(), content], make)

    def empty(self) -> Path:
        """A context without files."""
        place = self.folder / "empty"
        place.mkdir(parents=True, exist_ok=True)
        return place


def stage_layer(root: Path, path: str, where: Destination, place: Path, *, keep_times: bool, writable: bool) -> Path:
    """A context at `place` with the directory `path` of a store entry's `root`, at its destination in the base.

    Its files are hard links where that can be: the entry's own files were settled when it was kept.
    """
    source, target = root / path.lstrip("/"), place / where.path.lstrip("/")
    target.parent.mkdir(parents=True)
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    modes = {**_open_parents(where, 0o777 if writable else 0o755), **where.modes()}
    return settle(place, modes=modes, keep_times=keep_times, writable=writable)


def _open_parents(where: Destination, mode: int) -> dict[str, int]:
    """Modes for the directories above a destination; the base's own keep theirs, and the highest gets a plain one.

    Where a server writes, it makes further directories beside its caches.
    """
    parts = where.path.lstrip("/").split("/")[:-1]
    return {"/".join(parts[:at]): mode if at > 1 else 0o755 for at in range(1, len(parts) + 1)}


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def tuner_into(place: Path) -> None:
    """Put the tuner's launcher and package into an empty folder."""
    _copy_package(place / "pipeline", _IN_TUNER)
    shutil.copyfile(PACKAGE / "tune" / "launcher.py", place / "launcher.py")


@functools.cache
def tuner_content() -> str:
    """sha256 over all code that tunes: part of the inputs digest."""
    return sha256_json(package_content(_IN_TUNER))


def package_content(names: tuple[str, ...]) -> dict[str, str]:
    """Path and sha256 of every file of some rooms of the package."""
    found = [PACKAGE / "__init__.py"]
    for name in names:
        place = PACKAGE / name
        inside = [p for p in place.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        found += [place] if place.is_file() else inside
    return {str(path.relative_to(PACKAGE)): sha256_file(path) for path in sorted(found)}


def _copy_package(target: Path, names: tuple[str, ...]) -> None:
    target.mkdir(parents=True)
    shutil.copyfile(PACKAGE / "__init__.py", target / "__init__.py")
    for name in names:
        place = PACKAGE / name
        if place.is_file():
            shutil.copyfile(place, target / name)
        elif place.is_dir():
            shutil.copytree(place, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


def tree_digest(root: Path | None) -> str:
    """sha256 over a folder's files; empty when there is none."""
    if root is None:
        return ""
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return sha256_json({str(p.relative_to(root)): sha256_file(p) for p in files})
