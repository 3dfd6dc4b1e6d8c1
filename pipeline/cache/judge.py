"""Would FlashInfer use this file here? Its own rules over the environment record, and ours over the file.

FlashInfer compares each field of its *current* record with the saved one (`_classify_metadata_mismatches`, the same
in 0.6.16 and 0.7.4; a test runs both against `compare`):

    saved equals current, or saved is "*"          fine
    saved is missing, null, "unknown" or "None"    soft: the file is ignored, and replaced by the next save
    anything else                                  hard: the file is ignored and never replaced, so the process
                                                   tunes again at every start

Fields that only the file has are ignored. One differing field makes FlashInfer ignore the whole file. What it would
load without a look (no `_metadata`), or stumble over (malformed entries), is refused here in any environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.strictjson import LIMIT, Unreadable

from . import finding
from .finding import Finding
from .read import CacheFile, inspect_cache

Kind = Literal["hard", "soft"]
WILDCARD = "*"
_INDETERMINATE = (None, "unknown", "None")


@dataclass(frozen=True)
class Field:
    """One field of the record that differs; `saved` is None where the file lacks it."""

    name: str
    saved: Any
    current: str
    kind: Kind


@dataclass(frozen=True)
class Judgement:
    """The answer for one file. `because` is one line; `fields` and `findings` have every reason.

    `kind` is `hard` when any field differs hard, `soft` when all that differ are soft, empty when none does.
    `entries` counts what FlashInfer would have after loading. `compared` is False where no environment was given.
    """

    verdict: Literal["ok", "refused"]
    because: str
    kind: Literal["hard", "soft", ""]
    entries: int
    fields: tuple[Field, ...] = ()
    findings: tuple[Finding, ...] = ()
    compared: bool = True

    def to_json(self) -> dict[str, Any]:
        """The five values that programs read."""
        return {
            "verdict": self.verdict,
            "because": self.because,
            "kind": self.kind,
            "entries": self.entries,
            "fields": [{"name": f.name, "saved": f.saved, "current": f.current, "kind": f.kind} for f in self.fields],
        }


def compare(saved: object, current: Mapping[str, str]) -> tuple[Field, ...]:
    """The fields of `current` that differ from a saved record, hard ones first, else in the order of `current`."""
    known: Mapping[str, Any] = saved if isinstance(saved, dict) else {}
    found: list[Field] = []
    for name, value in current.items():
        was = known.get(name)
        if was in (value, WILDCARD):
            continue
        found.append(Field(name, was, value, "soft" if was in _INDETERMINATE else "hard"))
    return tuple(sorted(found, key=lambda f: f.kind != "hard"))


def judge(file: CacheFile, environment: Mapping[str, str] | None) -> Judgement:
    """Judge a file against FlashInfer's flat record; with None only the file itself is judged."""
    # Without a record FlashInfer compares nothing: that refusal is ours, and lists no fields.
    fields = compare(file.metadata, environment) if environment is not None and file.metadata is not None else ()
    reasons = list(dict.fromkeys(f.because or f.what for f in file.findings)) + [f.name for f in fields]
    kind: Literal["hard", "soft", ""] = ""
    if fields:
        kind = "hard" if any(f.kind == "hard" for f in fields) else "soft"
    return Judgement(
        verdict="refused" if reasons else "ok",
        because="; ".join(reasons),
        kind=kind,
        entries=file.usable,
        fields=fields,
        findings=file.findings,
        compared=environment is not None,
    )


def judge_source(
    source: bytes | Path, environment: Mapping[str, str] | None, *, where: str = "", limit: int = LIMIT
) -> Judgement:
    """Judge bytes or a path; whatever they contain, the answer is a judgement. Raises only `FileMissing`."""
    try:
        file = inspect_cache(source, where=where, limit=limit)
    except Unreadable as error:
        what = Finding("", error.message, error.hint or "tune again", error.because)
        return Judgement("refused", error.because, "", 0, (), (what,), environment is not None)
    return judge(file, environment)


def severity(judgement: Judgement) -> str:
    """What a refusal means at run time, in one sentence."""
    if judgement.verdict == "ok":
        return "FlashInfer uses it."
    if judgement.kind == "hard":
        return "FlashInfer ignores the whole file and never rewrites it: it would tune again at every start."
    if judgement.kind == "soft":
        return "FlashInfer ignores the whole file; the next save replaces it, where it may write."
    if finding.NO_METADATA in judgement.because or finding.WILDCARD in judgement.because:
        return "FlashInfer would load it where it does not fit."
    if judgement.because == finding.DROPPED:
        return "FlashInfer would load it without these entries, and tune them again or use defaults."
    return "FlashInfer would fail on it, or have nothing after loading it."
