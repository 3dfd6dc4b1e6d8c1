"""The host's store of warm-ups as `pipeline cache` sees it, and `pipeline cache rm`.

<cache home>/warm-ups/<inputs digest>/root/…, warmup.json       what a warm-up left, as it lies from `/` of the image
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import DockerError, Exit, PipelineError, UsageError
from pipeline.contract.files import scratch
from pipeline.contract.places import CACHE_ROOT, MANIFEST_FILE
from pipeline.contract.record import Host
from pipeline.contract.strictjson import FileMissing, parse_object, read_bytes

_DAY = 86_400
_YOUNG = 3600  # seconds: the image of what was kept just now may be in the making
_LABELS = tuple(f"io.github.tuned-image-pipeline.{name}" for name in ("manifest", "warm-up"))
_FOLDER, _ABOUT = "warm-ups", "warmup.json"
_REMOVING = ".removing-"


@dataclass(frozen=True)
class StoreEntry:
    """One entry of the store: its place, its size in bytes, when it was kept (seconds since the epoch).

    `kinds` maps each kind of cache to its bytes, where the entry says so.
    """

    place: Path
    size: int
    kept: float
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The cache root of FlashInfer's files inside it; it may not exist."""
        return self.place / "root" / CACHE_ROOT.lstrip("/")

    def marks(self) -> set[str]:
        """What the labels of an image that was baked from it name: the inputs digest, or the sha256 of a manifest."""
        found = (
            Path(folder) / MANIFEST_FILE for folder, _, names in os.walk(self.place / "root") if MANIFEST_FILE in names
        )
        return {self.place.name} | {sha256_file(path) for path in found if path.is_file() and not path.is_symlink()}


def stored() -> list[StoreEntry]:
    """All entries of the store, oldest first; what is being written at the moment is passed over."""
    from pipeline.home import cache_home

    return sorted(_entries(cache_home() / _FOLDER), key=lambda entry: entry.kept)


def _entries(folder: Path) -> Iterator[StoreEntry]:
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if place.name.startswith(".") or not place.is_dir() or place.is_symlink():
            continue
        about = place / _ABOUT
        facts = about.stat() if about.exists() else place.stat()
        yield StoreEntry(place, size_of(place), facts.st_mtime, _kinds(about))


def _kinds(about: Path) -> dict[str, int]:
    """Bytes by kind, from warmup.json; empty where it does not say."""
    try:
        caches = parse_object(read_bytes(about), str(about))[0].get("caches", ())
        kinds: dict[str, int] = {}
        for one in caches:
            kinds[str(one["kind"])] = kinds.get(str(one["kind"]), 0) + int(one["bytes"])
    except (PipelineError, ValueError, LookupError, TypeError):
        return {}
    return kinds


def size_of(place: Path) -> int:
    """Bytes of all files below a directory; what vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def rows_of(root: Path, entry: StoreEntry | None = None) -> list[dict[str, Any]]:
    """One row for each key below a root, with what its check found; a root that is none gives no rows."""
    from pipeline.cache.integrity import check
    from pipeline.cache.tree import walk

    try:
        tree = walk(root)
    except FileMissing:
        return []
    rows = []
    for one in tree.keys:
        manifest = one.manifest
        host = manifest.record.host if manifest is not None else Host()
        rows.append(
            {
                "key": str(one.key),
                "model": manifest.plan.model if manifest is not None else "",
                "device": ", ".join(dict.fromkeys(host.gpus)) or host.cpu.get("model", ""),
                "ranks": len(manifest.ranks) if manifest is not None else 0,
                "entries": len(one.file.entries) if one.file is not None else 0,
                "bytes": size_of(one.path),
                "ended": manifest.ended if manifest is not None else "",
                "inputs": entry.place.name if entry is not None else "",
                "path": str(one.path),
                "findings": [str(finding) for finding in check(one)],
            }
        )
    return rows


def rows_of_store() -> list[dict[str, Any]]:
    """One row for each key in the store, and one for each entry that has none (a server's own caches)."""
    rows: list[dict[str, Any]] = []
    for entry in stored():
        keys = rows_of(entry.root, entry)
        alone = {
            "key": "",
            "model": "",
            "device": "",
            "ranks": 0,
            "entries": 0,
            "bytes": entry.size,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.kept)),
            "inputs": entry.place.name,
            "path": str(entry.place),
            "findings": [],
        }
        rows += [{**row, "kinds": entry.kinds} for row in keys or [alone]]
    return rows


def strays(root: Path) -> list[str]:
    """What a listing of a root passes over, in words."""
    from pipeline.cache.finding import lines
    from pipeline.cache.tree import misplaced

    return list(lines(misplaced(root), 20)) if root.is_dir() else []


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache rm`."""
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help="an entry of the store, or the start of its name")
    parser.add_argument("--older-than", type=_days, metavar="DAYS", help="entries made longer ago")
    parser.add_argument("--unused", action="store_true", help="entries that no image here was baked from")
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")


def _days(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")


def execute(arguments: argparse.Namespace) -> int:
    """Remove what was chosen; print a line for each."""
    from pipeline import log

    filters = arguments.older_than is not None or arguments.unused
    if bool(arguments.entries) == filters:
        raise UsageError(
            "name entries, or give filters; not both" if filters else "name an entry, or give at least one filter",
            hint="`pipeline cache ls` names entries; filters: --older-than DAYS, --unused",
        )
    chosen = [(one, "named") for one in _named(arguments.entries)] or list(_filtered(arguments))
    for entry, why in chosen:
        print(f"{entry.place.name}  {entry.size} bytes  {why}")
        if not arguments.dry_run:
            remove(entry)
    verb = "would remove" if arguments.dry_run else "removed"
    count = "1 entry" if len(chosen) == 1 else f"{len(chosen)} entries"
    log.note(f"{verb} {count}, {sum(entry.size for entry, _ in chosen)} bytes")
    return int(Exit.OK)


def _named(names: Sequence[str]) -> list[StoreEntry]:
    """The entries that names, or their beginnings, choose. Raises `UsageError` unless each chooses exactly one."""
    found: dict[Path, StoreEntry] = {}
    for name in names:
        fits = [entry for entry in stored() if entry.place.name.startswith(name)] if name else []
        if len(fits) != 1:
            what = f"{len(fits)} entries begin with {name!r}" if fits else f"the store has no entry {name!r}"
            raise UsageError(what, hint="`pipeline cache ls` lists them")
        found[fits[0].place] = fits[0]
    return list(found.values())


def _filtered(arguments: argparse.Namespace) -> Iterator[tuple[StoreEntry, str]]:
    """Entries that are too old, or that no image was baked from, and why each goes.

    What was kept within the last hour counts as used: a build may have yet to make its image.
    """
    used = used_marks() if arguments.unused else set()
    for entry in stored():
        age = (time.time() - entry.kept) / _DAY
        if arguments.older_than is not None and age > arguments.older_than:
            yield entry, f"{age:.1f} days old"
        elif arguments.unused and time.time() - entry.kept >= _YOUNG and not entry.marks() & used:
            yield entry, "no image was baked from it"


def used_marks() -> set[str]:
    """What the labels of the images in the Docker Engine say that they were baked from.

    Raises a `DockerError` where none answers: without one, nothing can be called unused.
    """
    try:
        from pipeline.daemon import connect, find
    except ModuleNotFoundError as error:
        raise DockerError(f"the Python package {error.name}, which asks a Docker Engine, is not here") from error

    engine = find()
    if engine is None:
        raise DockerError("no Docker Engine answers, so what is unused is not known", hint="pipeline daemon up")
    with contextlib.closing(connect(engine)) as client:
        named = [
            str(image.labels.get(label, ""))
            for label in _LABELS
            for image in client.images.list(filters={"label": label})
        ]
        return {one for text in named for one in text.split(",") if one}  # an image may have several


def remove(entry: StoreEntry) -> None:
    """Remove an entry: out of sight by one rename first, so that nobody finds half of it."""
    with scratch(entry.place.parent, _REMOVING) as folder:
        aside = folder / "entry"
        with contextlib.suppress(FileNotFoundError):  # another removal was faster
            entry.place.rename(aside)
            shutil.rmtree(aside)
