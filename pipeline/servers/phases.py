"""What a server's log says: seconds by phase, and per rank which caches were hit or made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .adapter import Adapter
from .starts import Start

# `(Worker_TP1 pid=77)`, `(EngineCore_DP0 pid=9)` of vLLM; ` TP1]` of SGLang.
_RANK = re.compile(r"^\((\w+)(?: pid=\d+)?\)|^\[[^\]]*?\b((?:[DTEP]P\d+ ?)+)\]")


def seconds_by_phase(adapter: Adapter, start: Start) -> dict[str, float]:
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
    for name, spent_on in zip(("first request", "decode", "sampled request"), start.answers, strict=False):
        found[name] = round(spent_on, 2)
    return found


def rank_of(line: str) -> str:
    """The rank that printed a line; empty where the line names none."""
    match = _RANK.match(line)
    return (match[1] or match[2]).strip() if match else ""


def events(adapter: Adapter, start: Start) -> dict[tuple[str, str], Counter[str]]:
    """(kind, what happened) → how often, by rank."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for _, line in start.lines:
        for event in adapter.events:
            if re.search(event.pattern, line):
                found.setdefault((event.kind, event.says), Counter())[rank_of(line)] += 1
                break
    return found


def why(lines: Sequence[str]) -> str:
    """The line of a failed start that says most: the first error that is no consequence of another."""
    telling = re.compile(r"\b(\w+(Error|Exception|Refused)): \S|(^|\s)error: \S|argument .*: ", re.IGNORECASE)
    later = re.compile(r"Engine core initialization failed|EngineCore failed|See root cause|WorkerProc .* failed")
    found = [line for line in lines if telling.search(line) and not later.search(line)]
    text = found[0] if found else (lines[-1] if lines else "")
    return re.sub(r"^(\(\w+( pid=\d+)?\)\s*)?((ERROR|WARNING|INFO) \S+ \S+ \[[^\]]*\]\s*)?", "", text).strip()[:300]
