"""`pipeline pins`: the requirements of requirements files, those that they include among them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from pipeline.contract.exits import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline pins`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a requirements file")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, name, specifier, marker")


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per requirement; 2 where a file or a line cannot be read."""
    from pipeline.versions.requirements import Requirements, read
    from pipeline.versions.tree import Tree

    everything = Path("/")
    result = Requirements()
    shown: dict[str, str] = {}
    for file in arguments.files:
        inside = os.path.relpath(Path(file).absolute(), everything)
        shown[inside] = str(file)
        read(Tree(everything), inside, result)

    def name(path: str) -> str:
        return shown.get(path) or os.path.relpath(everything / path)

    rows = [
        {
            "file": name(pin.path),
            "line": pin.line,
            "name": pin.name,
            "specifier": pin.specifier,
            "marker": pin.marker,
            **({"url": pin.url} if pin.url else {}),
        }
        for pin in result.pins
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            address = f" @ {row['url']}" if "url" in row else ""
            marker = f" ; {row['marker']}" if row["marker"] else ""
            print(f"{row['file']}:{row['line']}: {row['name'] or ''}{address}{row['specifier']}{marker}")
    for note in result.notes:
        sys.stderr.write(f"note: {name(note.path)}:{note.line}: {note.message}\n")
    for problem in result.problems:
        place = f"{name(problem.path)}:{problem.line}" if problem.line else name(problem.path)
        sys.stderr.write(f"{place}: {problem.message}\n")
    return int(Exit.USAGE if result.problems else Exit.OK)
