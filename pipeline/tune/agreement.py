"""What ranks must agree on, compared where all of it lies side by side. No torch here, so that it is tested alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.digest import canonical_json
from pipeline.contract.errors import UsageError, WarmUpError

_SHOWN = 160  # characters of a value in a message


class RanksDiffer(WarmUpError):
    """The contract between the ranks is broken; they would hang or tune different things."""


class TacticsDiffer(WarmUpError):
    """Ranks hold different tactics for one key."""


class GpuShared(UsageError):
    """Two ranks run on one GPU."""


class EntryElsewhere(WarmUpError):
    """A rank lacks, or has, an entry against what the plan assigns it."""


@dataclass(frozen=True)
class Held:
    """An entry as one rank holds it: runner class, tactic as JSON, and what FlashInfer 0.7 keeps beside them."""

    runner: str
    tactic: Any
    policy: Any = None
    selection: Any = None

    def answer(self) -> bytes:
        """What must be the same everywhere. Measured times may differ in the last digit and stay out."""
        return canonical_json([self.runner, self.tactic])


@dataclass(frozen=True)
class RankResult:
    """What one rank ended with: its entries by file key, and for each op of the plan the keys that it used."""

    rank: int
    entries: Mapping[str, Held]
    used: Mapping[int, Sequence[str]] = field(default_factory=dict)


def agree(said: Sequence[Mapping[str, Any]], when: str) -> None:
    """Compare what the ranks said, in rank order, field by field; raise `RanksDiffer` naming each rank and field.

    The value that most ranks share is taken as right; on a tie, the leader's.
    """
    wrong: list[tuple[int, str, str]] = []
    for name in sorted({name for one in said for name in one}):
        values = [canonical_json(one.get(name)) for one in said]
        right = max(values, key=lambda value: (values.count(value), value == values[0]))
        usual = values.index(right)
        wrong += [
            (rank, name, f"rank {rank} differs in {name}: {_show(said[rank].get(name), said[usual].get(name), usual)}")
            for rank, value in enumerate(values)
            if value != right
        ]
    if wrong:
        rank, name, _ = wrong[0]
        raise RanksDiffer(
            f"rank {rank} differs from the others in {name} {when}",
            details=[line for _, _, line in wrong],
            hint="every rank must be started with the same plan, options, caches and environment",
        )


def one_gpu_each(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `GpuShared` naming two ranks with one GPU; `facts` holds rank, host and uuid (empty on a CPU) of each."""
    seen: dict[tuple[str, str], int] = {}
    for fact in facts:
        other = seen.setdefault((fact["host"], fact["uuid"]), fact["rank"])
        if fact["uuid"] and other != fact["rank"]:
            raise GpuShared(
                f"rank {fact['rank']} is on the GPU of rank {other}: {fact['uuid']}",
                hint="give each rank a GPU of its own: two on one would disturb each other's times",
            )


def merge(
    results: Sequence[RankResult],
    holders: Sequence[Sequence[int]] | None,
    hint: str = "nothing was saved; the ranks did not tune in step",
) -> tuple[dict[str, Held], dict[str, tuple[int, ...]]]:
    """Join the entries of all ranks; `holders[i]` lists the ranks that hold op `i` of the plan.

    Without `holders` an entry belongs to the ranks that say they used it. `hint` is for `TacticsDiffer`.

    Returns the union and, for entries that not every rank holds, their owners. Raises `TacticsDiffer` where two
    ranks answer one key differently, `EntryElsewhere` where a rank lacks an entry of an op that it holds.
    """
    union: dict[str, Held] = {}
    first: dict[str, int] = {}
    owners: dict[str, set[int]] = {}
    differ: list[tuple[int, str, str]] = []
    for result in results:
        for key, held in result.entries.items():
            owners.setdefault(key, set()).add(result.rank)
            other = union.setdefault(key, held)
            first.setdefault(key, result.rank)
            if other.answer() != held.answer():
                line = (
                    f"{key}: rank {first[key]} chose {_text([other.runner, other.tactic])}, "
                    f"rank {result.rank} chose {_text([held.runner, held.tactic])}"
                )
                differ.append((result.rank, key, line))
    if differ:
        rank, key, _ = differ[0]
        raise TacticsDiffer(
            f"rank {rank} chose another tactic than rank {first[key]} for {key}",
            details=[line for _, _, line in differ],
            hint=hint,
        )
    _placed(results, holders, owners)
    everyone = {result.rank for result in results}
    return union, {key: tuple(sorted(ranks)) for key, ranks in owners.items() if ranks != everyone}


def _placed(
    results: Sequence[RankResult], holders: Sequence[Sequence[int]] | None, owners: Mapping[str, set[int]]
) -> None:
    due: dict[str, set[int]] = {}
    for result in results:
        for op, keys in result.used.items():
            for key in keys:
                due.setdefault(key, set()).update((result.rank,) if holders is None else holders[op])
    lines = [
        f"{key}: held by rank {_ranks(owners.get(key, set()))}, the plan assigns it to rank {_ranks(ranks)}"
        for key, ranks in due.items()
        if owners.get(key, set()) != ranks
    ]
    if lines:
        raise EntryElsewhere(
            "not every rank has the entries that the plan assigns to it",
            details=lines,
            hint="nothing was saved; a rank may have run out of memory while it tuned",
        )


def _ranks(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "none"


def _show(mine: object, usual: object, rank: int) -> str:
    """The differing parts of two values; whole lists would hide the one element that differs."""
    if isinstance(mine, dict) and isinstance(usual, dict):
        names = [n for n in sorted({*mine, *usual}) if mine.get(n) != usual.get(n)]
        mine, usual = {n: mine.get(n) for n in names}, {n: usual.get(n) for n in names}
    return f"{_text(mine)} (rank {rank} has {_text(usual)})"


def _text(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
