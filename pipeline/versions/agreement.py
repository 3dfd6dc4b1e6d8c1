"""What the files of a tree mean, held against versions.json and against what packages require."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .findings import Finding
from .meaning import Meaning, collect, judge
from .metadata import check_metadata, governed_pins, lacking
from .recorded import Record, load_record
from .sites import public
from .source import FILE, Versions
from .ties import check_ties
from .tree import Tree


class Result(NamedTuple):
    """Every disagreement, sorted, and notes: things seen that are no disagreement between versions."""

    findings: list[Finding]
    notes: list[Finding]
    unusable: bool = False  # a template cannot be rendered


def check_meaning(
    tree: Tree,
    versions: Versions,
    rendered: Callable[[], tuple[list[Finding], bool]] = lambda: ([], False),
    *,
    record: Record | None = None,
) -> Result:
    """What a tree says, whether or not it is rendered; `record` replaces the recorded copy of packages' requirements.

    `rendered` gives the findings of rendering and whether that was possible at all; it is asked last.
    """
    meaning = collect(tree, versions)
    wrong: list[Finding] = []
    if record is None:
        record, wrong = load_record(tree)
    found = [*wrong, *judge(versions, meaning), *check_ties(versions), *pep440(versions, meaning)]
    if record is not None:
        found += check_metadata(versions, meaning, record)
    notes = list(meaning.notes)
    if record is None and not wrong and (missing := lacking(versions, governed_pins(versions, meaning))):
        (found if missing.rule else notes).append(missing)
    findings, unusable = rendered()
    told = {(finding.path, finding.line) for finding in findings}
    found = [one for one in found if one.rule != "reach" or (one.path, one.line) not in told]
    return Result(sorted({*findings, *found}), sorted(set(notes)), unusable)


def pep440(versions: Versions, meaning: Meaning) -> list[Finding]:
    """Values that govern a pin and are no versions."""
    needed = {site.name for site in meaning.sites if site.kind == "pin"}
    return [
        Finding(FILE, versions.variables[name].line, 0, f"{name}={versions[name]} is not a version (PEP 440)", "source")
        for name in sorted(needed)
        if public(versions[name]) is None
    ]
