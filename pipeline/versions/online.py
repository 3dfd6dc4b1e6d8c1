"""The check with the index asked: are the pinned versions there, and is what they require what was recorded?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import index
from .agreement import Result
from .check import check_all
from .findings import Finding, counted
from .meaning import collect
from .metadata import governed_pins, python_version
from .recorded import RECORD, Record, Recorded, load_record
from .source import load
from .texts import Texts
from .tree import Tree


def check_online(root: Path, say: Callable[[str], None]) -> Result:
    """Check a whole tree as `check` does, with packages' requirements from the index; raise `IndexFailed`."""
    versions = load(root)
    tree = Tree(root)
    findings: list[Finding] = []
    pins = governed_pins(versions, collect(tree, versions))
    python = python_version(versions)
    governors = Texts(versions).governors
    wanted = [(name, pin.extras, versions[governors[name]]) for name, pin in sorted(pins.items())]
    say(f"asking the index for {counted(len(wanted), 'package')}")
    fresh: dict[str, Recorded] = {}
    try:
        fresh = index.describe(wanted, python)
    except index.IndexLacks:
        for one in wanted:
            try:
                fresh |= index.describe([one], python)
            except index.IndexLacks:
                pin = pins[one[0]]
                findings.append(Finding(pin.path, pin.line, 0, f"the index has no {one[0]} {one[2]}", "index"))
    recorded, wrong = load_record(tree)
    findings += [*wrong, *_differences(fresh, recorded)]
    lacking = {name for name, _, _ in wanted} - set(fresh)
    result = check_all(root, versions, fresh)
    kept = {one for one in result.findings if one.rule != "record" or not lacking}
    return Result(sorted({*kept, *findings}), result.notes, result.unusable)


def _differences(fresh: Record, recorded: Record | None) -> list[Finding]:
    if recorded is None:
        return []
    return [
        Finding(
            RECORD, 0, 0, f"what {name} requires is not what was recorded; `pipeline versions bump --refresh`", "online"
        )
        for name, entry in fresh.items()
        if name in recorded and recorded[name] != entry
    ]
