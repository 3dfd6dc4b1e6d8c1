"""`pipeline versions usages`: every place that a version reaches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions usages`."""
    parser.add_argument("name", metavar="NAME", help="e.g. FLASHINFER_VERSION")
    parser.add_argument("--json", action="store_true", help="print an array of path, line, name, kind, text, wrong")
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree (default: here)")


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per place."""
    from pipeline.versions.check import in_words, usages
    from pipeline.versions.findings import near
    from pipeline.versions.source import FILE, canonical, load

    versions = load(arguments.root)
    if arguments.name not in versions:
        governor = versions.packages().get(canonical(arguments.name))
        said = f"{arguments.name} is governed by {governor}: `pipeline versions usages {governor}`" if governor else ""
        hint = said or near(arguments.name, versions).removeprefix("; ") or f"names stand in {FILE}"
        raise UsageError(f"{FILE} has no {arguments.name}", hint=hint)
    found = usages(arguments.root, versions, arguments.name)
    if arguments.json:
        print(json.dumps([one._asdict() for one in found], indent=2))
    else:
        for one in found:
            print(in_words(one))
    return int(Exit.OK)
