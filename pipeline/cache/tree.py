"""Walking a cache root without trusting it.

    <root>/<flashinfer-version>/<arch>/<hash>/
        autotune_configs.json
        manifest.json

No symbolic link is followed, no name that is not a key's is entered, and the number of names is bounded. What does
not belong is reported, never skipped silently.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import PipelineError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.record import Key
from pipeline.contract.strictjson import FileMissing, Unreadable, read_bytes
from pipeline.contract.text import shown

from .finding import Finding
from .read import CacheFile, inspect_cache

_STRAY = "is this a cache root? Remove what does not belong there"
_NAMES = 10_000  # directory entries looked at in one walk


@dataclass(frozen=True)
class Stored:
    """One key's directory: what could be read of it, and what is wrong with what could not."""

    key: Key
    path: Path
    file: CacheFile | None
    manifest: Manifest | None
    findings: tuple[Finding, ...] = ()

    @property
    def cache_path(self) -> Path:
        """FlashInfer's file."""
        return self.path / CACHE_FILE


@dataclass(frozen=True)
class Tree:
    """All keys below a root in order, and what lies there that is no key."""

    root: Path
    keys: tuple[Stored, ...]
    findings: tuple[Finding, ...] = ()


def walk(root: Path) -> Tree:
    """Read every key below a cache root. Raises `FileMissing` when the root is not a directory."""
    if root.is_symlink() or not root.is_dir():
        raise FileMissing(f"{shown(str(root))} is not a directory", hint="give the directory above <version>/<arch>/")
    found: list[Finding] = []
    keys = [read_key(root, key) for key in _keys(root, found)]
    return Tree(root, tuple(keys), tuple(found))


def find_keys(root: Path) -> tuple[Key, ...]:
    """Only the names of the keys below a root, nothing read: what a start-up can afford. Never raises."""
    return tuple(_keys(root, []))


def misplaced(root: Path) -> tuple[Finding, ...]:
    """What lies below a root where only keys belong, or may not be read; the keys themselves are not looked into."""
    found: list[Finding] = []
    for _ in _keys(root, found):
        pass
    return tuple(found)


def read_key(root: Path, key: Key) -> Stored:
    """Read one key's directory; what is wrong with it is among its findings."""
    path = root / str(key)
    wrong: list[Finding] = []
    for entry in _scan(path, wrong):
        if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
            wrong.append(Finding(_at(root, path / entry.name), "is not a regular file", "remove it"))
    file, manifest = None, None
    where = f"{key}/{CACHE_FILE}"
    try:
        lacking = absent(path / CACHE_FILE)
        if lacking:
            wrong.append(Finding(where, lacking, "tune again"))
        else:
            file = inspect_cache(path / CACHE_FILE, where=where)
            wrong.extend(file.findings)
    except (FileMissing, Unreadable) as error:
        wrong.append(Finding(where, error.message, error.hint or "tune again", getattr(error, "because", "")))
    try:
        manifest = load_manifest(path / MANIFEST_FILE)
    except PipelineError as error:
        said = error.details or [error.message.removeprefix(f"{MANIFEST_FILE}: ")]
        wrong += [Finding(f"{key}/{MANIFEST_FILE}", line, error.hint or "tune again") for line in said]
    return Stored(key, path, file, manifest, tuple(wrong))


def files_of(path: Path) -> tuple[str, ...]:
    """Names of all that lies in a key's directory, in order; links count as files."""
    try:
        return tuple(sorted(one.name for one in path.iterdir() if one.is_symlink() or not one.is_dir()))
    except OSError:  # reported already
        return ()


def sums(path: Path) -> dict[str, str]:
    """The sha256 of each file of a key's directory, without the manifest, whose times differ from tune to tune."""
    return {
        name: sha256_file(path / name) for name in files_of(path) if name != MANIFEST_FILE and not absent(path / name)
    }


def load_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises `FileMissing`, `Unreadable` or `ManifestInvalid`."""
    if os.path.islink(path):  # noqa: PTH114 - Path.is_symlink raises where the directory may not be entered
        raise FileMissing(f"{path.name} is a symbolic link", hint="tune again")
    return Manifest.load(read_bytes(path))


def manifest_beside(file: Path) -> Manifest | None:
    """The manifest beside a baked cache file; None where there is no sound one: FlashInfer does not look."""
    try:
        return load_manifest(file.with_name(MANIFEST_FILE)) if file.name == CACHE_FILE else None
    except PipelineError:
        return None


def _keys(root: Path, found: list[Finding]) -> Iterator[Key]:
    for version in _directories(root, root, found):
        for arch in _directories(root, version, found):
            for digest in _directories(root, arch, found):
                try:
                    yield Key.parse(f"{version.name}/{arch.name}/{digest.name}")
                except PipelineError as error:
                    found.append(Finding(_at(root, digest), error.message, "remove it"))


def _directories(root: Path, path: Path, found: list[Finding]) -> list[Path]:
    inside: list[Path] = []
    for entry in _scan(path, found):
        if entry.is_dir(follow_symlinks=False):
            inside.append(path / entry.name)
        else:
            what = "is a symbolic link" if entry.is_symlink() else "lies where only directories belong"
            found.append(Finding(_at(root, path / entry.name), what, _STRAY))
    return inside


def _scan(path: Path, found: list[Finding]) -> list[os.DirEntry[str]]:
    entries: list[os.DirEntry[str]] = []
    try:
        with os.scandir(path) as names:
            for entry in names:
                if len(entries) >= _NAMES:
                    found.append(Finding(shown(str(path)), f"has more than {_NAMES} names", "is this a cache root?"))
                    break
                entries.append(entry)
    except OSError as error:
        found.append(Finding(shown(str(path)), f"cannot be read: {error.strerror}", "make it readable"))
    return sorted(entries, key=lambda entry: entry.name)


def absent(path: Path) -> str:
    """Why there is no regular file to read at `path`, a link being none; empty where there is one."""
    try:
        return "" if stat.S_ISREG(path.lstat().st_mode) else "is missing"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:  # its directory may not be entered
        return f"cannot be read: {error.strerror}"


def _at(root: Path, path: Path) -> str:
    return shown(str(path.relative_to(root)))
