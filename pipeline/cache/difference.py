"""Two caches side by side: entries that only one has, entries that differ and in what, times where they were recorded.

A lookup asks for the whole key. Two keys stand for the same question only where they are equal, or where nothing but
the runner that won tells them apart; what the runner adds to a key (FlashInfer 0.6.18 to 0.7.1 put the rank there for
MoE layers) makes it another question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.manifest import Manifest
from pipeline.contract.text import shown

from .entrykey import op_and_runner, parse_key
from .otherkeys import second_keys, second_keys_note
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
        """The pair in one line: what differs, in a and in b."""
        tactics = [
            shown(one.tactic, 40) + ("" if time is None else f" ({time:.4f} ms)")
            for one, time in ((self.a, self.time_a), (self.b, self.time_b))
        ]
        said = [f"tactic {tactics[0]} | {tactics[1]}"]
        if self.a.runner != self.b.runner:
            said.insert(0, f"runner {shown(self.a.runner, 40)} | {shown(self.b.runner, 40)}")
        return f"{shown(self.op, 40)} {_shapes(self.key_a)}: {', '.join(said)}"


@dataclass(frozen=True)
class Difference:
    """What differs between two files. `common` counts the shapes that both answer, `differ` those answered otherwise.

    A key names the runner that won, so where another runner won it is another key: that counts as common, and as
    differing. `only_*` are shapes that one of the two does not answer at all. `twice_*` counts the entries of a
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
        """Whether both have the same entries under the same record."""
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
            f"{len(keys)} {'entry' if len(keys) == 1 else 'entries'} only in {name}"
            for name, keys in (("a", self.only_a), ("b", self.only_b))
            if keys
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
                said += [f"  {_only(key, self.only_b if name == 'a' else self.only_a)}" for key in keys[:_MOST]]
        if self.twice_a == self.twice_b:
            return said + [f"counted once: in each, {line}" for line in [second_keys_note(self.twice_a)] if line]
        for name, count in (("a", self.twice_a), ("b", self.twice_b)):
            said += [f"in {name}, {line}" for line in [second_keys_note(count)] if line]
        return said


def difference(a: Side, b: Side) -> Difference:
    """Compare two files, keys in order."""
    twice_a, twice_b = second_keys(a.file.entries), second_keys(b.file.entries)
    shared = [(key, key) for key in a.file.entries if key in b.file.entries]
    moved = _other_runner(
        [key for key in a.file.entries if key not in b.file.entries],
        [key for key in b.file.entries if key not in a.file.entries],
    )
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


def _other_runner(left: Iterable[str], right: Iterable[str]) -> list[tuple[str, str]]:
    """Keys of two caches that ask the same and were won by different runners.

    First those that are equal but for the runner; then, since each runner adds to a key what it likes, those that are
    the only ones of their op and shapes on both sides.
    """
    pairs: list[tuple[str, str]] = []
    for whole in (True, False):
        places: tuple[dict[object, list[str]], dict[object, list[str]]] = ({}, {})
        for keys, found in zip((left, right), places, strict=True):
            for key in keys:
                parts = parse_key(key)
                if parts is not None:
                    found.setdefault((parts.op, parts.shapes, parts.extras if whole else ()), []).append(key)
        pairs += [
            (ours[0], theirs[0])
            for ours, theirs in ((ours, places[1].get(place, [])) for place, ours in places[0].items())
            if len(ours) == len(theirs) == 1 and op_and_runner(ours[0]) != op_and_runner(theirs[0])
        ]
        taken = {key for pair in pairs for key in pair}
        left, right = ([key for key in keys if key not in taken] for keys in (left, right))
    return pairs


def _only(key: str, others: Iterable[str]) -> str:
    """A key that one side lacks; where that side has it but for what the runner adds, both additions."""
    parts = parse_key(key)
    for other in map(parse_key, others) if parts is not None else ():
        if other is not None and parts is not None and other[:3] == parts[:3]:
            return f"{shown(key)} (the other has {shown(other.extras, 60)} where this has {shown(parts.extras, 60)})"
    return shown(key)


def _shapes(key: str) -> str:
    parts = parse_key(key)
    if parts is None:
        return shown(key, 60)
    return " × ".join("(" + ", ".join(map(str, shape)) + ")" for shape in parts.shapes[:2] if isinstance(shape, tuple))
