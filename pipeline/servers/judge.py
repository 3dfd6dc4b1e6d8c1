"""What starts show: seconds by phase; of a baked start, against the last warm one, each kind hit, missed or rebuilt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import kinds
from .adapters import Adapter
from .starts import Start

HIT, MISSED, REBUILT = "hit", "missed", "rebuilt"
# `(Worker_TP1 pid=77)`, `(EngineCore_DP0 pid=9)` of vLLM; ` TP1]` of SGLang.
_RANK = re.compile(r"^\((\w+)(?: pid=\d+)?\)|^\[[^\]]*?\b((?:[DTEP]P\d+ ?)+)\]")
_TELLING = re.compile(r"\b(\w+(Error|Exception|Refused)): \S|(^|\s)error: \S|argument .*: ", re.IGNORECASE)
_CONSEQUENCE = re.compile(r"Engine core initialization failed|EngineCore failed|See root cause|WorkerProc .* failed")
_PREFIX = re.compile(r"^(\(\w+( pid=\d+)?\)\s*)?((ERROR|WARNING|INFO) \S+ \S+ \[[^\]]*\]\s*)?")
_NO_ERROR = re.compile(r"^(\(\w+( pid=\d+)?\)\s*)?(WARNING|INFO|DEBUG) ")
_REQUESTS = ("first request", "decode", "sampled request")


def why(lines: Sequence[str]) -> str:
    """The line of a failed start that says most: the first error that is no consequence of another, nor a warning."""
    text = lines[-1] if lines else ""
    for line, following in zip(lines, (*lines[1:], ""), strict=True):
        if _TELLING.search(line) and not _CONSEQUENCE.search(line) and not _NO_ERROR.match(line):
            text = following if "validation error" in line and following else line  # pydantic says it in the next line
            break
    return _PREFIX.sub("", text).strip()[:300]


def last_words(start: Start) -> str:
    """When each rank spoke last, for a start in which none ended: the one that hangs falls silent first."""
    last = {rank: at for at, text in start.lines if (rank := _rank(text))}
    workers = {rank: at for rank, at in last.items() if "API" not in rank and "EngineCore" not in rank}
    if len(workers) < 2:
        return ""
    return "last words: " + ", ".join(
        f"{rank} after {at:.0f} s" for rank, at in sorted(workers.items(), key=lambda x: x[1])
    )


def _rank(line: str) -> str:
    found = _RANK.match(line)
    return (found[1] or found[2]).strip() if found else ""


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
        return Summary(
            ready=start.ready,
            seconds=_seconds(adapter, start),
            new=kinds.count(start.new),
            changed=kinds.count(start.changed),
            compilers=start.compilers,
            events=_events(adapter, start),
        )

    @staticmethod
    def read(value: Mapping[str, Any]) -> Summary:
        """From JSON values."""
        return Summary(**{**value, "events": tuple((k, w, r, int(n)) for k, w, r, n in value["events"])})

    def by_rank(self, kind: str, what: str) -> dict[str, int]:
        """How often each rank said so."""
        return {rank: count for k, w, rank, count in self.events if (k, w) == (kind, what)}


def _seconds(adapter: Adapter, start: Start) -> dict[str, float]:
    """Seconds of each phase that the log shows, the rest up to ready, and the requests."""
    found: dict[str, float] = {}
    past = 0.0
    for phase in adapter.phases:
        if phase.took:
            spent = [float(m[1]) for _, text in start.lines if (m := re.search(phase.took, text))]
            if spent:
                found[phase.name] = round(max(spent), 2)
            continue
        at = next((at for at, text in start.lines if at >= past and re.search(phase.ends, text)), None)
        if at is not None:
            found[phase.name] = round(at - past, 2)
            past = at
    if start.ready:
        found["serve"] = round(max(0.0, start.ready - past), 2)
    return {**found, **dict(zip(_REQUESTS, (round(one, 2) for one in start.answers), strict=False))}


def _events(adapter: Adapter, start: Start) -> tuple[tuple[str, str, str, int], ...]:
    found: Counter[tuple[str, str, str]] = Counter()
    for _, line in start.lines:
        event = next((one for one in adapter.events if re.search(one.pattern, line)), None)
        if event is not None:
            found[event.kind, event.says, _rank(line)] += 1
    return tuple((*key, count) for key, count in sorted(found.items()))


@dataclass(frozen=True)
class Judged:
    """What became of one kind; `said` is the reason where it was not hit."""

    kind: str
    result: str
    said: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.result}" + (f" ({self.said})" if self.said else "")


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
