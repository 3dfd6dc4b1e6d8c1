"""`pipeline versions usages`: every place that a version reaches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit


class UnknownName(UsageError):
    """versions.json has no such name."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions usages`."""
    parser.add_argument("name", metavar="NAME", help="e.g. FLASHINFER_VERSION")
    parser.add_argument("--json", action="store_true", help="print an array of path, line, name, kind, text, wrong")
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree (default: here)")


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per place."""
    from pipeline.versions.findings import near, printable
    from pipeline.versions.relations import canonical
    from pipeline.versions.source import FILE, load
    from pipeline.versions.where import where

    versions = load(arguments.root)
    if arguments.name not in versions:
        governor = versions.governors().get(canonical(arguments.name))
        said = (
            f"; {arguments.name} is governed by {governor}: `pipeline versions usages {governor}`" if governor else ""
        )
        hint = (said or near(arguments.name, versions)).removeprefix("; ") or f"names stand in {FILE}"
        raise UnknownName(f"{FILE} has no {arguments.name}", hint=hint)
    sites = where(arguments.root, versions, arguments.name)
    if arguments.json:
        print(json.dumps([site._asdict() for site in sites], indent=2))
        return int(Exit.OK)
    for site in sites:
        wrong = f"  <- {site.wrong}" if site.wrong else ""
        print(printable(f"{site.path}:{site.line}: {site.kind}: {site.text}{wrong}"))
    return int(Exit.OK)
