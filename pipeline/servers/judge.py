"""A baked start against the last warm one: per kind of cache hit, missed or rebuilt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import kinds
from .adapter import Adapter
from .phases import events, seconds_by_phase, why
from .starts import Start

HIT, MISSED, REBUILT = "hit", "missed", "rebuilt"


@dataclass(frozen=True)
class Summary:
    """One start in figures: files by kind that it wrote new or again, compilers that ran, its log's events by rank."""

    ready: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    new: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    compilers: Mapping[str, int] = field(default_factory=dict)
    events: tuple[tuple[str, str, str, int], ...] = ()  # kind, what happened, rank, how often

    @staticmethod
    def of(adapter: Adapter, start: Start) -> Summary:
        """From a start that was watched."""
        said = events(adapter, start)
        return Summary(
            ready=start.ready,
            seconds=seconds_by_phase(adapter, start),
            new=kinds.count(start.new),
            changed=kinds.count(start.changed),
            compilers=start.compilers,
            events=tuple(
                (kind, what, rank, count)
                for (kind, what), ranks in sorted(said.items())
                for rank, count in ranks.items()
            ),
        )

    @staticmethod
    def read(value: Mapping[str, Any]) -> Summary:
        """From JSON values."""
        return Summary(**{**value, "events": tuple((k, w, r, int(n)) for k, w, r, n in value["events"])})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def by_rank(self, kind: str, what: str) -> dict[str, int]:
        """How often each rank said so."""
        return {rank: count for k, w, rank, count in self.events if (k, w) == (kind, what)}


@dataclass(frozen=True)
class Judged:
    """What became of one kind; `said` is the reason where it was not hit."""

    kind: str
    result: str
    said: str = ""


def by_kind(baked: Sequence[str], reference: Summary, start: Summary) -> tuple[Judged, ...]:
    """Judge every kind that is baked, and every kind that the start wrote all the same."""
    found = []
    for kind in sorted({*baked, *start.new, *start.changed} - {kinds.BYTECODE, kinds.MANIFEST}):
        new = start.new.get(kind, 0) - reference.new.get(kind, 0)
        changed = start.changed.get(kind, 0) - reference.changed.get(kind, 0)
        failed = _more(start, reference, kind, "failed")
        made = _more(start, reference, kind, "made") or _more(reference, start, kind, "hit")
        if changed > 0:
            found.append(Judged(kind, REBUILT, f"{changed} files were written again"))
        elif failed:
            found.append(Judged(kind, REBUILT, f"it could not be loaded{failed}"))
        elif new > 0:
            found.append(Judged(kind, MISSED, f"{new} new files"))
        elif made:
            found.append(Judged(kind, MISSED, f"its log shows no hit{made}"))
        else:
            found.append(Judged(kind, HIT))
    return tuple(found)


def _more(one: Summary, other: Summary, kind: str, what: str) -> str:
    """The ranks in `one` that said so more often than in `other`, for a message; empty where there is none."""
    before = other.by_rank(kind, what)
    ranks = sorted(rank for rank, count in one.by_rank(kind, what).items() if count > before.get(rank, 0))
    return (f" ({', '.join(filter(None, ranks)) or 'by the server'})") if ranks else ""


def findings(baked: Sequence[str], reference: Summary, start: Start, adapter: Adapter) -> tuple[str, ...]:
    """Why the image is refused, by one start of it; empty where it rebuilds nothing that the last warm one did not."""
    if start.outcome != "ready":
        said = why(start.tail(200))
        return (f"the server did not start: {start.message}" + (f": {said}" if said else ""),)
    now = Summary.of(adapter, start)
    found = [f"{one.kind} {one.result}: {one.said}" for one in by_kind(baked, reference, now) if one.result != HIT]
    if sum(now.compilers.values()) > sum(reference.compilers.values()):
        ran = ", ".join(f"{name} ×{count}" for name, count in sorted(now.compilers.items()))
        found.append(f"compilers ran that did not in the last warm start: {ran}")
    return tuple(found)
