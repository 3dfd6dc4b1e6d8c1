"""Several caches made one: keys side by side, or the entries of files of one environment together.

Never a choice between two answers: the same key with different contents is refused, with the entries that differ.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.files import is_taken, whole_folder, write_json
from pipeline.contract.text import shown

from .difference import Side, difference
from .finding import Finding, lines
from .integrity import check_root
from .read import METADATA, RECORDS, CacheFile, spelled
from .tree import Stored, sums


class MergeConflict(CacheRefused):
    """Two inputs answer one key differently, or come from different environments; the details name each."""


class MergeUnsound(CacheRefused):
    """An input must not be used; every reason is among the details."""


class OutputExists(UsageError):
    """The place to write to is taken."""


def merge_roots(roots: Sequence[tuple[str, Path]], out: Path) -> tuple[str, ...]:
    """Put all keys of several cache roots below `out`, which must not exist or be empty; return the keys.

    Raises `MergeUnsound`, `MergeConflict` or `OutputExists`, and then `out` is as it was.
    """
    if is_taken(out):
        raise OutputExists(f"{shown(str(out))} exists and is not empty", hint="name a new directory")
    ensure_parent(out, roots)
    keys: dict[str, tuple[str, Stored]] = {}
    unsound: list[Finding] = []
    conflicts: list[str] = []
    for name, root in roots:
        tree, findings = check_root(root)
        for found in findings:
            where = name if found.where in ("", shown(str(root))) else f"{name}: {found.where}"
            unsound.append(Finding(where, found.what, found.hint))
        for stored in tree.keys:
            known = keys.setdefault(str(stored.key), (name, stored))
            conflicts += _conflict(known, (name, stored))
    if unsound:
        raise MergeUnsound(
            f"refused: {unsound[0]}", details=lines(unsound) if len(unsound) > 1 else (), hint=unsound[0].hint
        )
    if conflicts:
        raise MergeConflict(
            f"not merged: {conflicts[0]}", details=conflicts if len(conflicts) > 1 else (), hint="keep one of the two"
        )
    with whole_folder(out) as made:
        for key, (_, stored) in sorted(keys.items()):
            shutil.copytree(stored.path, made / key)
    return tuple(sorted(keys))


def ensure_parent(out: Path, roots: Sequence[tuple[str, Path]] = ()) -> None:
    """Make the directory that `out` will lie in. Raises `OutputExists` below a file, or inside one of the roots."""
    place = Path(os.path.realpath(out))
    for name, root in roots:
        if place.is_relative_to(os.path.realpath(root)):
            raise OutputExists(f"{shown(str(out))} lies inside {shown(name)}", hint="name a directory beside it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OutputExists(f"{shown(str(out.parent))} is no directory", hint="name a new directory") from error


def _conflict(known: tuple[str, Stored], new: tuple[str, Stored]) -> list[str]:
    (name_a, a), (name_b, b) = known, new
    if a is b or a.file is None or b.file is None or sums(a.path) == sums(b.path):
        return []
    found = difference(Side.of(name_a, a.file, a.manifest), Side.of(name_b, b.file, b.manifest))
    if found.same:  # the same answers spelled otherwise: the first one's files are kept
        return []
    return [f"key {a.key} in {name_a} and {name_b}: {line}" for line in found.lines()[2:]]


def merge_files(files: Sequence[tuple[str, CacheFile]]) -> dict[str, Any]:
    """All entries of several files of one environment as one file's JSON value, as per-rank files may be joined.

    FlashInfer's `_generation` is left out: it is the digest of a file that is no more, and loading does not need it.
    Raises `MergeConflict` where records or entries differ.
    """
    first_name, first = files[0]
    entries = dict(first.entries)
    records: dict[str, Any] = dict(first.extras.get(RECORDS, {}))
    wrong: list[str] = []
    for name, file in files[1:]:
        found = difference(Side(first_name, replace(first, entries=entries), {}), Side(name, file, {}))
        # A shape that another runner won has another key, so that both would stand in the file: a conflict as well.
        wrong += [f"{pair.line()} (in {name})" for pair in found.differ]
        for field, (was, now) in found.record.items():
            wrong.append(f"{shown(field, 40)}: {shown(was, 60)} in {first_name}, {shown(now, 60)} in {name}")
        for space, value in file.extras.get(RECORDS, {}).items():
            if records.setdefault(space, value) != value:
                wrong.append(f"_records of {shown(space, 40)} differ in {name}")
        entries |= {key: entry for key, entry in file.entries.items() if key not in entries}
    if wrong:
        raise MergeConflict(
            f"not merged: {wrong[0]}",
            details=wrong[:50] if len(wrong) > 1 else (),
            hint="merge files of one tuning run",
        )
    return {
        METADATA: dict(first.metadata or {}),
        **({RECORDS: records} if records else {}),
        **{key: spelled(entry) for key, entry in sorted(entries.items())},
    }


def write_file(value: Mapping[str, Any], out: Path) -> None:
    """Write a merged file; raise `OutputExists` where something is already."""
    if os.path.lexists(out):
        raise OutputExists(f"{shown(str(out))} exists", hint="name a new file")
    ensure_parent(out)
    write_json(out, value)
