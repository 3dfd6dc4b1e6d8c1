"""Two caches side by side: entries that only one has, tactics that differ, times where they were recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.manifest import Manifest

from .entrykey import op_and_runner, parse_key
from .finding import shown
from .otherkeys import second_keys, told
from .read import CacheFile, Entry

_MOST = 200  # differing entries shown to people; all of them are in the JSON


@dataclass(frozen=True)
class Side:
    """One of the two: its file, and the time of each entry in milliseconds where it is known."""

    name: str
    file: CacheFile
    times: Mapping[str, float]

    @staticmethod
    def of(name: str, file: CacheFile, manifest: Manifest | None) -> Side:
        """Times from the entries themselves (0.7), else from the manifest's rows."""
        rows = manifest.covered if manifest is not None else ()
        times = {row.entry: row.time_ms for row in rows if row.time_ms is not None}
        times |= {key: entry.time_ms for key, entry in file.entries.items() if entry.time_ms is not None}
        return Side(name, file, times)


@dataclass(frozen=True)
class Differing:
    """One shape that both caches answer differently: another tactic, or another runner and so another key."""

    op: str
    bucket: int | None
    key_a: str
    key_b: str
    a: Entry
    b: Entry
    time_a: float | None
    time_b: float | None

    def to_json(self) -> dict[str, Any]:
        """The pair as JSON values."""
        return {
            "op": self.op,
            "bucket": self.bucket,
            "a": {"key": self.key_a, "runner": self.a.runner, "tactic": self.a.tactic, "time_ms": self.time_a},
            "b": {"key": self.key_b, "runner": self.b.runner, "tactic": self.b.tactic, "time_ms": self.time_b},
        }

    def line(self) -> str:
        """The pair in one line."""
        sides = []
        for entry, time in ((self.a, self.time_a), (self.b, self.time_b)):
            sides.append(
                f"{shown(entry.runner, 40)} {shown(entry.tactic, 40)}" + ("" if time is None else f" {time:.4f} ms")
            )
        return f"{shown(self.op, 40)} {_shapes(self.key_a)}: {sides[0]} | {sides[1]}"


@dataclass(frozen=True)
class Difference:
    """What differs between two files. `common` counts the shapes that both answer, `differ` those answered otherwise.

    A key names the runner that won, so a shape that another runner won has another key: it counts as common, and
    as differing. `only_*` are shapes that one of the two does not answer at all. `twice_*` counts the entries of a
    side that say a second time what another of it says (`otherkeys`): answers count once, and such an entry is among
    `only_*` where the other side has the answer without its second key.
    """

    a: str
    b: str
    common: int
    differ: tuple[Differing, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    twice_a: int
    twice_b: int
    record: Mapping[str, tuple[Any, Any]]

    @property
    def same(self) -> bool:
        """Whether both hold the same entries under the same record."""
        return not (self.differ or self.only_a or self.only_b or self.record)

    def per_op(self) -> dict[str, int]:
        """How many tactics differ, by op."""
        return dict(sorted(Counter(pair.op for pair in self.differ).items()))

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "a": self.a,
            "b": self.b,
            "same": self.same,
            "common": self.common,
            "differing": len(self.differ),
            "per_op": self.per_op(),
            "differ": [pair.to_json() for pair in self.differ],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "twice": {"a": self.twice_a, "b": self.twice_b},
            "record": {name: {"a": was, "b": now} for name, (was, now) in self.record.items()},
        }

    def line(self) -> str:
        """How much differs, in one line."""
        counts = ", ".join(f"{count} {op}" for op, count in self.per_op().items())
        said = [f"{self.common} common shapes", f"{len(self.differ)} differ" + (f" ({counts})" if counts else "")]
        said += [
            f"{len(keys)} entries only in {name}" for name, keys in (("a", self.only_a), ("b", self.only_b)) if keys
        ]
        return ", ".join([*said, "another record"] if self.record else said)

    def lines(self) -> list[str]:
        """Everything for people."""
        said = [f"a: {shown(self.a, 4096)}", f"b: {shown(self.b, 4096)}", self.line()]
        for name, (was, now) in self.record.items():
            said.append(f"  record {shown(name, 40)}: {shown(was, 60)} | {shown(now, 60)}")
        said += [f"  {pair.line()}" for pair in self.differ[:_MOST]]
        if len(self.differ) > _MOST:
            said.append(f"  … and {len(self.differ) - _MOST} more")
        for name, keys in (("a", self.only_a), ("b", self.only_b)):
            if keys:
                said.append(f"only in {name}:")
                said += [f"  {shown(key)}" for key in keys[:_MOST]]
        if self.twice_a == self.twice_b:
            return said + [f"counted once: in each, {line}" for line in [told(self.twice_a)] if line]
        for name, count in (("a", self.twice_a), ("b", self.twice_b)):
            said += [f"in {name}, {line}" for line in [told(count)] if line]
        return said


def difference(a: Side, b: Side) -> Difference:
    """Compare two files, keys in order."""
    twice_a, twice_b = second_keys(a.file.entries), second_keys(b.file.entries)
    shared = [(key, key) for key in a.file.entries if key in b.file.entries]
    left = _by_place(key for key in a.file.entries if key not in b.file.entries)
    right = _by_place(key for key in b.file.entries if key not in a.file.entries)
    # Only where each has one key at a place is it clear which belongs to which.
    moved = [(left[p][0], right[p][0]) for p in left if len(left[p]) == 1 and len(right.get(p, ())) == 1]
    taken = {key for pair in moved for key in pair}
    pairs = [pair for pair in shared + moved if not (pair[0] in twice_a and pair[1] in twice_b)]
    was, now = dict(a.file.metadata or {}), dict(b.file.metadata or {})
    return Difference(
        a=a.name,
        b=b.name,
        common=len(pairs),
        differ=tuple(_pair(a, b, x, y) for x, y in sorted(pairs) if x != y or _answer(a, x) != _answer(b, y)),
        only_a=_alone(a, b, taken),
        only_b=_alone(b, a, taken),
        twice_a=len(twice_a),
        twice_b=len(twice_b),
        record={n: (was.get(n), now.get(n)) for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)},
    )


def _alone(one: Side, other: Side, taken: set[str]) -> tuple[str, ...]:
    """The keys of shapes that only one side answers, each answer once."""
    keys = {key for key in one.file.entries if key not in other.file.entries and key not in taken}
    return tuple(sorted(keys - second_keys({key: one.file.entries[key] for key in keys})))


def _answer(side: Side, key: str) -> tuple[str, Any]:
    entry = side.file.entries[key]
    return entry.runner, entry.tactic


def _pair(a: Side, b: Side, key_a: str, key_b: str) -> Differing:
    parts = parse_key(key_a)
    return Differing(
        op=op_and_runner(key_a)[0] or "?",
        bucket=parts.bucket if parts is not None else None,
        key_a=key_a,
        key_b=key_b,
        a=a.file.entries[key_a],
        b=b.file.entries[key_b],
        time_a=a.times.get(key_a),
        time_b=b.times.get(key_b),
    )


def _by_place(keys: Iterable[str]) -> dict[object, list[str]]:
    """Keys by op and shapes without the runner: the same place in two caches, whoever won it."""
    places: dict[object, list[str]] = {}
    for key in keys:
        parts = parse_key(key)
        places.setdefault(key if parts is None else (parts.op, parts.shapes), []).append(key)
    return places


def _shapes(key: str) -> str:
    parts = parse_key(key)
    if parts is None:
        return shown(key, 60)
    return " × ".join("(" + ", ".join(map(str, shape)) + ")" for shape in parts.shapes[:2] if isinstance(shape, tuple))
