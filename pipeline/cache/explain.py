"""Would this cache be used here, and if not: why, what to do, and what does it cost? One answer per key.

Judgement (one file, FlashInfer's rules)  +  manifest (integrity, times)  +  advice and cost  =  Answer
all Answers of a root  =  Explanation: used when one sound key fits and none is broken
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.manifest import Manifest
from pipeline.contract.places import MANIFEST_FILE
from pipeline.contract.record import Record
from pipeline.contract.strictjson import Unreadable
from pipeline.contract.text import shown

from .advice import Advice, Cost, advise, cost_of_dead_entries, cost_of_refusal
from .environment import Environment
from .finding import Finding
from .integrity import check
from .judge import Judgement, judge, judge_source, severity
from .otherkeys import second_keys, second_keys_note
from .read import CacheFile, inspect_cache
from .tree import Stored, Tree, manifest_beside

_MOST = 20  # findings shown per key; all of them are in the JSON


@dataclass(frozen=True)
class Answer:
    """One cache file. `broken` means damage, which is wrong in any environment."""

    name: str
    judgement: Judgement
    advice: tuple[Advice, ...]  # one for each of the judgement's fields
    cost: Cost
    broken: bool
    tuned_for: str = ""
    partial: bool = False  # only the host half was compared
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        value = self.judgement.to_json()
        for row, advice in zip(value["fields"], self.advice, strict=True):
            row |= {"why": advice.why, "do": advice.remedy}
        findings = [{"where": f.where, "what": f.what, "do": f.hint} for f in self.judgement.findings]
        return {
            "key": self.name,
            "tuned_for": self.tuned_for,
            **value,
            "findings": findings,
            "cost": self.cost.to_json(),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Everything, for people."""
        found = self.judgement
        head = f"{self.name}: {found.entries} entries" + (f", tuned for {self.tuned_for}" if self.tuned_for else "")
        verdict = "used" if found.compared else "sound, and not compared with any environment"
        if found.compared and self.partial:
            verdict = "fits, as far as it was compared"
        said = [head, f"  {verdict if found.verdict == 'ok' else 'REFUSED: ' + found.because}"]
        if found.verdict != "ok":
            said.append(f"  {severity(found)}")
        for field, advice in zip(found.fields, self.advice, strict=True):
            saved = "nothing" if field.saved is None else shown(field.saved, 80)
            said.append(f"    {field.name} ({field.kind}): saved {saved}, here {shown(field.current, 80)}")
            said += [f"      why: {advice.why}", f"      do:  {advice.remedy}"]
        for finding in found.findings[:_MOST]:
            said.append(f"    {finding}" + (f" — {finding.hint}" if finding.hint else ""))
        if len(found.findings) > _MOST:
            said.append(f"    … and {len(found.findings) - _MOST} more findings")
        said += [f"  cost: {line}" for line in self.cost.lines()]
        return said + [f"  note: {note}" for note in self.notes]


@dataclass(frozen=True)
class Explanation:
    """The answer for a file, a directory or an image."""

    verdict: Literal["ok", "refused"]
    because: str
    kind: str
    entries: int
    fields: tuple[Mapping[str, Any], ...]
    answers: tuple[Answer, ...]

    def to_json(self) -> dict[str, Any]:
        """`{verdict, because, kind, entries, fields}`, and under `keys` every answer in full."""
        return {
            "verdict": self.verdict,
            "because": self.because,
            "kind": self.kind,
            "entries": self.entries,
            "fields": [dict(field) for field in self.fields],
            "keys": [answer.to_json() for answer in self.answers],
        }

    def lines(self) -> list[str]:
        """The answers for people."""
        return [line for answer in self.answers for line in answer.lines()]


def explain_file(source: bytes | Path, environment: Environment | None, *, name: str = "") -> Explanation:
    """Explain one file, whatever its bytes. Raises only `FileMissing`, when there is no file."""
    manifest = None
    if isinstance(source, Path):
        name = name or shown(str(source))
        manifest = manifest_beside(source)
    try:
        file = inspect_cache(source, where=name)
    except Unreadable:
        return combine([_answer(name, judge_source(source, None, where=name), None, None, environment)])
    record = environment.record if environment is not None else None
    return combine([_answer(name, judge(file, record), file, manifest, environment)])


def explain_tree(tree: Tree, environment: Environment | None, *, baked: bool) -> Explanation:
    """Explain every key below a root. `baked` demands manifests: without one a key is then broken."""
    answers = [_stored_answer(stored, environment, baked) for stored in tree.keys]
    if tree.findings or not tree.keys:
        findings = tree.findings or (Finding("", "no cache was found", "tune a model first", "no cache"),)
        answers.append(_broken(shown(str(tree.root)), findings))
    return combine(answers)


def combine(answers: Iterable[Answer]) -> Explanation:
    """One verdict for several keys: broken ones refuse, else one that fits is enough, else the nearest one speaks."""
    every = tuple(answers)
    broken = [answer for answer in every if answer.broken]
    fitting = [answer for answer in every if answer.judgement.verdict == "ok"]
    if broken:
        speaker = broken[0]
        because = "; ".join(dict.fromkeys(answer.judgement.because for answer in broken))
    elif fitting:
        speaker, because = fitting[0], ""
    else:
        speaker = min(every, key=lambda a: (len(a.judgement.fields), a.name))
        because = speaker.judgement.because
    found = speaker.judgement
    return Explanation(
        verdict="refused" if because else "ok",
        because=because,
        kind=found.kind,
        entries=found.entries,
        fields=tuple(found.to_json()["fields"]),
        answers=every,
    )


def _stored_answer(stored: Stored, environment: Environment | None, baked: bool) -> Answer:
    lacks_manifest = stored.manifest is None and not os.path.lexists(stored.path / MANIFEST_FILE)
    findings = check(stored)
    notes: tuple[str, ...] = ()
    if lacks_manifest and not baked:
        findings = tuple(f for f in findings if not f.where.endswith(MANIFEST_FILE))
        notes = ("no manifest lies beside it: another tool made it, or it was copied without",)
    name = str(stored.key)
    if stored.file is None:
        return _broken(name, findings)
    file = replace(stored.file, findings=findings)
    judgement = judge(file, environment.record if environment is not None else None)
    answer = _answer(name, judgement, file, stored.manifest, environment, arch=stored.key.arch)
    return replace(answer, notes=notes + answer.notes)


def _answer(
    name: str,
    judgement: Judgement,
    file: CacheFile | None,
    manifest: Manifest | None,
    environment: Environment | None,
    *,
    arch: str = "",
) -> Answer:
    record = manifest.record if manifest is not None else None
    if environment is not None:
        judgement = _with_fields(judgement, environment.host_fields(arch or (record.arch if record else ""), record))
        judgement = replace(judgement, compared=bool(environment.record or (environment.cpu and _is_cpu(record))))
    notes = []
    if environment is not None and not environment.complete:
        notes.append(f"{environment.source}: --env or --live compares the whole record")
    if environment is not None and environment.complete and environment.record and file is not None:
        lacking = [name for name in (file.metadata or {}) if name not in environment.record]
        if lacking:
            notes.append(f"not compared, since the record given lacks them: {', '.join(map(shown, lacking[:20]))}")
    wild = [name for name, value in ((file.metadata or {}) if file else {}).items() if value == "*"]
    if wild:
        notes.append(f"not compared, since the file says '*': {', '.join(map(shown, wild))}")
    if file is not None and (twice := second_keys(file.entries)):
        notes.append(second_keys_note(len(twice)))
    used = judgement.verdict == "ok" and file is not None
    return Answer(
        name=name,
        judgement=judgement,
        advice=tuple(advise(field) for field in judgement.fields),
        cost=cost_of_dead_entries(file) if used and file is not None else cost_of_refusal(file, manifest),
        broken=bool(judgement.findings),
        tuned_for=_device(manifest, file),
        partial=environment is not None and not environment.complete,
        notes=tuple(notes),
    )


def _is_cpu(record: Record | None) -> bool:
    return record is not None and bool(record.host.cpu)


def _with_fields(judgement: Judgement, more: tuple[Any, ...]) -> Judgement:
    if not more:
        return judgement
    names = "; ".join(field.name for field in more)
    return replace(
        judgement,
        verdict="refused",
        because=f"{judgement.because}; {names}" if judgement.because else names,
        kind="hard",
        fields=judgement.fields + more,
    )


def _broken(name: str, findings: tuple[Finding, ...]) -> Answer:
    because = "; ".join(dict.fromkeys(f.because or f.what for f in findings))
    return Answer(name, Judgement("refused", because, "", 0, (), findings), (), Cost(), broken=True)


def _device(manifest: Manifest | None, file: CacheFile | None) -> str:
    if manifest is not None and manifest.record.host.cpu:
        return shown(manifest.record.host.cpu.get("model", ""))
    gpu = (file.metadata or {}).get("gpu", "") if file is not None else ""
    return shown(gpu, 80) if gpu not in ("", "unknown", "*", None) else ""
