"""What an engine left behind, as one: the union of its ranks' files, who holds what, and where groups differ.

The union is a file as FlashInfer's AutoTuner saves it. `explain`, `diff` and our own checks read it; the engine reads
its own files, which lie beside it as it wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.cache.entrykey import op_and_runner, parse_key
from pipeline.cache.read import METADATA, CacheFile, Entry, spelled
from pipeline.contract.manifest import Covered

from . import managed
from .group import Group, RankFile, read_group


@dataclass(frozen=True)
class Collected:
    """`files` are the group's files as read, `entries` their union, `held` the number of entries of each rank.

    `owners` names the ranks of each entry that not every rank holds. `differ` counts shapes to which ranks that tune
    apart from each other (pipeline stages) have different answers; the union then has the first rank's.
    """

    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]
    files: tuple[tuple[RankFile, CacheFile], ...]
    held: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    differ: int = 0

    def value(self) -> dict[str, Any]:
        """The union as the JSON value of FlashInfer's file."""
        return {METADATA: dict(self.metadata), **{key: spelled(one) for key, one in sorted(self.entries.items())}}

    def rows(self) -> tuple[Covered, ...]:
        """A manifest's row for each entry; an engine says neither which candidates there were nor, mostly, times."""
        return tuple(_row(key, entry) for key, entry in sorted(self.entries.items()))


def collect(group: Group, world: int) -> Collected:
    """Join the files of a group that was checked before; one file for all ranks counts for `world` of them."""
    files = tuple(read_files(group))
    union: dict[str, Entry] = {}
    holders: dict[str, list[int]] = {}
    differ = set()
    for rank, (_, file) in enumerate(files):
        for key, entry in file.entries.items():
            known = union.setdefault(key, entry)
            holders.setdefault(key, []).append(rank)
            if (known.runner, known.tactic) != (entry.runner, entry.tactic):
                differ.add(key)
    metadata = managed.record_of(files[0][1].metadata or {}) if files else {}
    if len(files) == 1:
        return Collected(metadata, union, files, (len(union),) * world)
    every = list(range(len(files)))
    owners = {key: tuple(ranks) for key, ranks in holders.items() if ranks != every}
    return Collected(metadata, union, files, tuple(len(file.entries) for _, file in files), owners, len(differ))


def read_files(group: Group) -> Sequence[tuple[RankFile, CacheFile]]:
    """Every readable file of a group; a managed store is one."""
    if group.parts.get("kind") == "store":
        return [(group.files[0], managed.read(group))]
    return read_group(group)[0]


def _row(key: str, entry: Entry) -> Covered:
    parts = parse_key(key)
    bucket = parts.bucket if parts is not None else None
    candidates = (entry.selection or {}).get("candidates", 0)
    return Covered(
        op=op_and_runner(key)[0] or key,
        bucket=bucket or 0,
        entry=key,
        runner=entry.runner,
        tactic=entry.tactic,
        candidates=candidates if type(candidates) is int else 0,
        time_ms=entry.time_ms,
    )
