"""The whole check, in order: the source, the rendered files, what the files mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .findings import Finding, printable
from .meaning import Meaning, collect, judge
from .metadata import Record, check_metadata, governed_pins, lacking, load_record
from .render import TemplatesInvalid, has_templates, render
from .sites import public
from .source import FILE, Versions, load
from .ties import check_ties
from .tree import Tree, ordinary, refusal


class Result(NamedTuple):
    """Every disagreement, sorted, and notes: things seen that are no disagreement between versions."""

    findings: list[Finding]
    notes: list[Finding]
    unusable: bool = False  # a template cannot be rendered


def check(root: Path) -> Result:
    """Check a whole tree; raise `SourceInvalid` where there is no telling what is right."""
    versions = load(root)
    return check_meaning(Tree(root), versions, *rendered(root, versions))


def rendered(root: Path, versions: Versions) -> tuple[list[Finding], bool]:
    """Findings of rendering a tree's templates, and whether they could not be rendered at all."""
    if not has_templates(root):
        return [], False
    try:
        return compare(root, versions), False
    except TemplatesInvalid as error:
        return error.findings, True


def check_meaning(
    tree: Tree,
    versions: Versions,
    findings: Sequence[Finding] = (),
    unusable: bool = False,
    *,
    record: Record | None = None,
) -> Result:
    """What a tree says, without rendering it; `record` replaces the recorded copy of packages' requirements."""
    meaning = collect(tree, versions)
    wrong: list[Finding] = []
    if record is None:
        record, wrong = load_record(tree)
    told = {(finding.path, finding.line) for finding in findings}
    judged = [
        finding
        for finding in judge(versions, meaning)
        if finding.rule != "reach" or (finding.path, finding.line) not in told
    ]
    found = [*findings, *wrong, *judged, *check_ties(versions), *pep440(versions, meaning)]
    if record is not None:
        found += check_metadata(versions, meaning, record)
    notes = list(meaning.notes)
    if record is None and not wrong and (missing := lacking(versions, governed_pins(versions, meaning))):
        (found if missing.rule else notes).append(missing)
    return Result(sorted(set(found)), sorted(set(notes)), unusable)


def pep440(versions: Versions, meaning: Meaning) -> list[Finding]:
    """Values that govern a pin and are no versions."""
    needed = {site.name for site in meaning.sites if site.kind == "pin"}
    return [
        Finding(FILE, versions.variables[name].line, 0, f"{name}={versions[name]} is not a version (PEP 440)", "source")
        for name in sorted(needed)
        if public(versions[name]) is None
    ]


def compare(root: Path, versions: Versions) -> list[Finding]:
    """Committed files that are not, byte for byte, what the templates give; each with a unified diff."""
    findings = []
    for path, wanted in render(root, versions).files.items():
        try:
            found = Path(ordinary(root / path)).read_bytes()
        except FileNotFoundError:
            findings.append(Finding(path, 0, 0, "is missing; `pipeline sync` writes it", "render"))
            continue
        except OSError as error:
            findings.append(Finding(path, 0, 0, refusal(error), "render"))
            continue
        if found != wanted:
            diff = unified(path, found, wanted, "committed", "rendered")
            line = first_difference(found, wanted)
            findings.append(Finding(path, line, 0, "differs from its template; run `pipeline sync`", "render", diff))
    return findings


def first_difference(found: bytes, wanted: bytes) -> int:
    """The first line, from 1, in which two files differ."""
    pairs = zip(found.split(b"\n"), wanted.split(b"\n"), strict=False)
    return next((number for number, (one, two) in enumerate(pairs, 1) if one != two), found.count(b"\n") + 1)


def unified(path: str, before: bytes, after: bytes, was: str, will: str) -> str:
    """A unified diff of two versions of a file, each named by a word."""
    import difflib

    old, new = (re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "backslashreplace")) for data in (before, after))
    shown = printable(path)
    lines = difflib.unified_diff(old, new, f"{shown} ({was})", f"{shown} ({will})")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
