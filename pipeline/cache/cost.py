"""What it costs when a file, or some of its entries, is not used: ops on default tactics, times, tuning again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from .entrykey import op_and_runner
from .otherkeys import second_keys
from .read import CacheFile

if TYPE_CHECKING:
    from pipeline.contract.manifest import Covered, Manifest


@dataclass(frozen=True)
class OpCost:
    """One op: how many shapes run on default tactics, and by what factor that is slower where it was measured.

    `mean` is the geometric mean over its buckets of default time over tuned time, `worst` the largest; None where
    the manifest has no times.
    """

    op: str
    shapes: int
    mean: float | None = None
    worst: float | None = None


@dataclass(frozen=True)
class Cost:
    """What is lost. `seconds` is how long tuning took when the cache was made, None where that is not recorded."""

    ops: tuple[OpCost, ...] = ()
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The cost as JSON values."""
        ops = [{"op": o.op, "shapes": o.shapes, "mean": o.mean, "worst": o.worst} for o in self.ops]
        return {"default_tactics": ops, "tuning_seconds": self.seconds}

    def lines(self) -> list[str]:
        """The cost in words; empty when nothing is lost."""
        said = []
        for op in self.ops:
            line = f"{op.op or 'unreadable keys'}: {op.shapes} shapes run on default tactics"
            if op.mean is not None and op.worst is not None:
                line += f", {op.mean:.2f}x the tuned time on average, {op.worst:.2f}x at worst (measured when tuned)"
            said.append(line)
        if said and self.seconds is not None:
            said.append(f"or tuning again at start takes about {self.seconds:.0f} s")
        return said


def cost_of_refusal(file: CacheFile | None, manifest: Manifest | None) -> Cost:
    """All that a refused file would have answered."""
    if manifest is not None:
        seconds = max((rank.seconds for rank in manifest.ranks), default=None)
        return Cost(tuple(_measured(manifest.covered)), seconds)
    return Cost(_counted(file.entries.keys() - second_keys(file.entries)) if file is not None else ())


def cost_of_dead_entries(file: CacheFile) -> Cost:
    """What a *used* file does not answer: plans that FlashInfer drops, and entries that no lookup can reach.

    A lookup asks for the runner that the key names, so an entry with another runner in it never answers.
    """
    dead = {key: entry for key, entry in file.entries.items() if entry.dropped or _unreachable(key, entry.runner)}
    return Cost(_counted(dead.keys() - second_keys(dead)))


def _unreachable(key: str, runner: str) -> bool:
    if f", '{runner}', " in key:  # how `str()` spells it; the slower look is for what is not spelled so
        return False
    named = op_and_runner(key)[1]
    return bool(named) and named != runner


def _counted(keys: Iterable[str]) -> tuple[OpCost, ...]:
    counts = Counter(op_and_runner(key)[0] for key in keys)
    return tuple(OpCost(op, count) for op, count in sorted(counts.items()))


def _measured(rows: Iterable[Covered]) -> Iterable[OpCost]:
    by_op: dict[str, list[Covered]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    for op, covered in by_op.items():
        ratios = [r.default_ms / r.time_ms for r in covered if _timed(r.default_ms) and _timed(r.time_ms)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        yield OpCost(op, len(covered), mean, max(ratios, default=None))


def _timed(time_ms: float | None) -> TypeGuard[float]:
    """Whether a time can be divided by: real kernels take from nanoseconds to minutes."""
    return time_ms is not None and 1e-6 < time_ms < 1e6
