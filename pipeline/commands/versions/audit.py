"""`pipeline versions audit`: find versions that disagree in a repository that is not built this way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit
from pipeline.versions.findings import counted, printable

if TYPE_CHECKING:
    from pipeline.versions.audit import Disagreement, Place

_SHOWN = 4  # places of one value in text


class NoTree(UsageError):
    """There is nothing to audit at that path."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions audit`."""
    parser.add_argument("path", type=path, metavar="PATH", help="the root of a repository")
    parser.add_argument("--all", action="store_true", help="also what is only possibly wrong")
    parser.add_argument("--json", action="store_true", help="print an object with findings, unreadable and counts")


def execute(arguments: argparse.Namespace) -> int:
    """Print disagreements, strongest first; 3 where there are any."""
    from pipeline import log
    from pipeline.versions.audit import Confidence, judge, look

    if not arguments.path.is_dir():
        what = "is not a folder" if arguments.path.exists() else "does not exist"
        raise NoTree(printable(f"{arguments.path} {what}"), hint="PATH is the root of a repository")
    report = look(arguments.path)
    found = judge(report.places)
    shown = [one for one in found if arguments.all or one.confidence > Confidence.POSSIBLE]
    if arguments.json:
        print(
            json.dumps(
                {
                    "findings": [_object(one) for one in shown],
                    "unreadable": [{"path": one.path, "why": one.message} for one in report.unreadable],
                    "files": report.files,
                    "read": report.read,
                    "passed_over": report.passed_over,
                    "weaker": len(found) - len(shown),
                },
                indent=2,
            )
        )
    else:
        print("\n".join(_text(one) for one in shown), end="\n" if shown else "")
    for problem in report.unreadable:
        log.note(f"note: {problem.text()}")
    weaker = f"; {counted(len(found) - len(shown), 'weaker one')} with --all" if len(found) > len(shown) else ""
    log.note(f"{counted(len(shown), 'finding')} in {report.read} of {counted(report.files, 'file')}{weaker}")
    return int(Exit.DRIFT if shown else Exit.OK)


def _object(one: Disagreement) -> dict[str, object]:
    values = [{"value": value, "places": [_place(place) for place in places]} for value, places in one.values]
    return {"name": one.name, "confidence": one.confidence.name.lower(), "why": one.why, "values": values}


def _place(place: Place) -> dict[str, object]:
    data = asdict(place)
    return {name: data[name] for name in ("path", "line", "kind", "name", "value", "scope")}


def _text(one: Disagreement) -> str:
    lines = [f"{one.confidence.name.lower()}: {one.name}: {one.why}"]
    values = [(printable(value), places) for value, places in one.values]
    width = max(len(value) for value, _ in values)
    lines += [f"  {value:<{width}}  {_where(places)}" for value, places in values]
    return "\n".join(map(printable, lines))


def _where(places: Sequence[Place]) -> str:
    named = [f"{place.path}:{place.line} ({place.kind} {place.name})" for place in places[:_SHOWN]]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return ", ".join(named) + more
