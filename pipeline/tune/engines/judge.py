"""Whether what an engine left may be baked: by its own rule, by the record of the stage, by the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.judge import compare
from pipeline.cache.layouts import Layout
from pipeline.cache.layouts.collected import Collected
from pipeline.cache.layouts.group import Group
from pipeline.contract.errors import CacheRefused, WarmUpError
from pipeline.contract.plan import EngineRun
from pipeline.contract.record import Record
from pipeline.contract.text import shown

from .serve import tail

_SHOWN = 30


class EngineTunedNothing(WarmUpError):
    """The engine started and left no cache."""


class EngineCacheRefused(CacheRefused):
    """What the engine left must not be baked; every reason is among the details."""


@dataclass(frozen=True)
class Expected:
    """The number of ranks that the engine's arguments make, and the record of the stage that it ran in."""

    world: int
    record: Record


def only_group(layout: Layout, home: Path, engine: EngineRun, logfile: Path) -> Group:
    """The one group of files that the engine left. Raises `EngineTunedNothing` or `EngineCacheRefused`."""
    groups = layout.gather(str(home))
    if not groups:
        raise EngineTunedNothing(
            f"{engine.name} was ready and left no tuned tactics",
            details=tail(logfile),
            hint="it tunes only where its autotune is on and a layer runs on a FlashInfer op that has tactics: "
            "in vLLM --moe-backend flashinfer_cutlass, for one",
        )
    if len(groups) > 1:
        raise EngineCacheRefused(
            f"{engine.name} left {len(groups)} caches, and a key holds one",
            details=[group.directory for group in groups],
            hint="a draft model has one of its own, which cannot be baked yet: leave speculative decoding out",
        )
    return groups[0]


def judge(layout: Layout, group: Group, found: Collected, expected: Expected) -> None:
    """Raise `EngineCacheRefused` with every reason against what the engine left."""
    said = list(layout.check(group))
    for one, file in found.files:
        for field in compare(file.metadata, expected.record.flashinfer):
            saved, current = shown(field.saved, 60), shown(field.current, 60)
            said.append(f"{one.path.name}: {field.name} is {saved}, the record of this stage says {current}")
    kind, count, world = group.parts.get("kind", "ranks"), len(found.files), expected.world
    if count != (world if kind == "ranks" else 1) or (kind == "store" and world > 1):
        said.append(f"{count} files ({kind}), and its arguments make {world} ranks")
    if not found.entries:
        said.append("no entries")
    if said:
        raise EngineCacheRefused(
            f"what {layout.NAME} left has {len(said)} faults: {said[0]}",
            details=said[:_SHOWN],
            hint="nothing was baked; it would not use this cache at its next start either",
        )
