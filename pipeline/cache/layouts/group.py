"""Files that belong together, one per rank or one for all, and the rules that every layout shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cache.difference import Side, difference
from pipeline.cache.finding import because
from pipeline.cache.read import CacheFile, inspect_cache
from pipeline.contract.strictjson import FileMissing, Unreadable
from pipeline.contract.text import shown

_DEPTH = 8
_MOST = 10_000


@dataclass(frozen=True)
class RankFile:
    """One file. `place` is who reads it: `(("dp", 0), ("rank", 1))`; empty for a file that all ranks share."""

    path: Path
    place: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Group:
    """The files of one engine start: below `root`, in `directory`, whose parts the layout gives a meaning."""

    layout: str
    root: Path
    directory: str
    files: tuple[RankFile, ...]
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """`variable` is set to a writable directory, and the group's files are copied to `directory` below it."""

    variable: str
    directory: str
    writes: str  # what the engine writes there, for people


def files_below(root: Path, fits: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below `root` whose names fit, sorted; neither links nor more than a few levels are followed."""
    count = 0
    for folder, names, files in os.walk(root, followlinks=False):
        names[:] = sorted(names) if len(Path(folder).relative_to(root).parts) < _DEPTH else []
        for name in sorted(files):
            path = Path(folder) / name
            count += 1
            if count > _MOST:
                return
            if fits(name) and path.is_file() and not path.is_symlink():
                yield path


def read_group(group: Group) -> tuple[list[tuple[RankFile, CacheFile]], list[str]]:
    """Read every file of a group, and say what is wrong with those that are not sound."""
    found: list[tuple[RankFile, CacheFile]] = []
    wrong: list[str] = []
    for one in group.files:
        name = f"{group.directory}/{one.path.name}"
        try:
            file = inspect_cache(one.path, where=name)
        except (FileMissing, Unreadable) as error:
            wrong.append(error.message)
            continue
        if file.findings:
            wrong.append(f"{name}: {because(file.findings)}")
        found.append((one, file))
    return found, wrong


def same_records(files: list[tuple[RankFile, CacheFile]]) -> list[str]:
    """Ranks whose environment record differs from the first one's: FlashInfer would load the file on some only."""
    said = []
    for one, file in files[1:]:
        was, now = files[0][1].metadata or {}, file.metadata or {}
        names = [shown(name) for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
        if names:
            said.append(f"{one.path.name} has another record than {files[0][0].path.name}: {', '.join(names)}")
    return said


def same_answers(files: list[tuple[RankFile, CacheFile]]) -> list[str]:
    """Shapes that two ranks answer differently; keys that only some ranks have are fine (experts)."""
    said: list[str] = []
    for one, file in files[1:]:
        first, base = files[0]
        found = difference(Side(first.path.name, base, {}), Side(one.path.name, file, {}))
        said += [f"{first.path.name} and {one.path.name} differ: {pair.line()}" for pair in found.differ]
    return said


def whole_ranks(group: Group) -> list[str]:
    """Places that are missing in the grid that the others span."""
    places = {one.place for one in group.files}
    if len(places) < len(group.files):
        return ["two files are for one rank"]
    names = [name for name, _ in group.files[0].place] if group.files else []
    sizes = [max(dict(place)[name] for place in places) + 1 for name in names]
    missing: list[Any] = []
    for index in range(_product(sizes)):
        place = []
        for name, size in zip(reversed(names), reversed(sizes), strict=True):
            place.append((name, index % size))
            index //= size  # noqa: PLW2901 - digits of a mixed-radix number
        if tuple(reversed(place)) not in places:
            missing.append(tuple(reversed(place)))
        if len(missing) > 8:
            break
    return [f"no file for {', '.join(f'{n} {v}' for n, v in place)}" for place in missing]


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return min(total, _MOST)
