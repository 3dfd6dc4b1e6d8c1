"""The whole check, offline: the source, the rendered files, the locks, and what the files of a tree say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import lock, scan
from .findings import Finding, printable
from .render import FOLDER, TemplatesInvalid, compare, has_templates, render
from .source import FILE, Versions, load


@dataclass
class Result:
    """All findings, sorted; notes that change no exit code; `unusable`: a template cannot be rendered."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unusable: bool = False


def check(root: Path, file: str = FILE) -> Result:
    """Check a whole tree; raise `SourceInvalid` where there is no telling what is right."""
    versions = load(root, file)
    result = Result()
    if not versions.own:
        usual = ", ".join(versions.governs) or "none"
        result.notes.append(
            f"{file} has no `governs`: compared are ARGs and bake variables of its names, `NAME=value` of those that "
            f"end in _VERSION, and what is usual for these: {usual}"
        )
    files: Mapping[str, bytes] = {}
    if versions.own and has_templates(root):  # another project's templates/ may be anything
        try:
            files = render(root, versions)
            result.findings += compare(root, files)
        except TemplatesInvalid as error:
            result.findings += error.findings
            result.unusable = True
    result.findings += agreement(root, versions, committed(root, versions, files))
    result.findings = sorted(set(result.findings))
    return result


def committed(root: Path, versions: Versions, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The .in files and locks of a tree; `files` (just rendered) come before what lies there."""
    found = dict(files)
    for name in versions.locks:
        for path in (lock.source(name), lock.target(name)):
            if path not in found and (root / path).is_file():
                found[path] = (root / path).read_bytes()
    return found


def agreement(
    root: Path, versions: Versions, files: Mapping[str, bytes], rendered: Mapping[str, bytes] | None = None
) -> list[Finding]:
    """Locks against their .in files, occurrences against versions.json, and names that nothing uses.

    `files` has .in files and locks; `rendered` replaces files of the tree that are not written yet.
    """
    found = scan.scan(root, versions, rendered=rendered)
    findings = found.wrong()
    findings += lock.check_locks(versions, files)
    places = [*found.occurrences, *templates(root, versions)]
    used = versions.closure([*versions.in_locks, *(one.name for one in places)])
    findings += [
        Finding(versions.file, versions.lines[name], f"{name} is unused: no ARG, pin or bake argument references it",
                "source")
        for name in versions
        if name not in used
    ]  # fmt: skip
    return findings


def templates(root: Path, versions: Versions) -> list[scan.Occurrence]:
    """Lines of templates that name a version."""
    found = []
    for path in sorted(path for path in (root / FOLDER).rglob("*.j2") if path.is_file()):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            for name in dict.fromkeys(re.findall(r"\b[A-Za-z_]\w*\b", line) if "{{" in line or "{%" in line else ()):
                if name in versions:
                    place = path.relative_to(root).as_posix()
                    found.append(scan.Occurrence(place, number, name, "template", line.strip()))
    return found


def usages(root: Path, versions: Versions, name: str) -> list[scan.Occurrence]:
    """Every place that a name reaches: its own line, names made of it, templates, and what `scan` finds."""
    rows = versions.text.split("\n")
    reach = {other for other in versions if name in versions.closure([other])}
    found = [
        scan.Occurrence(versions.file, versions.lines[other], other, "source", rows[versions.lines[other] - 1].strip())
        for other in reach
    ]
    found += [one for one in templates(root, versions) if one.name in reach]
    found += [one for one in scan.scan(root, versions).occurrences if one.name in reach]
    return sorted(set(found))


def in_words(occurrence: scan.Occurrence) -> str:
    """One line for people."""
    wrong = f"  <-{occurrence.wrong[1:]}" if occurrence.wrong else ""
    return printable(f"{occurrence.path}:{occurrence.line}: {occurrence.kind}: {occurrence.text}{wrong}")
