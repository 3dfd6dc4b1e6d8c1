"""`pipeline versions pins`: the requirements of requirements files, those that they include among them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit
from pipeline.contract.text import without_login


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions pins`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a requirements file")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, name, specifier, marker")


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per requirement; 2 where a file or a line cannot be read."""
    from pipeline import log
    from pipeline.versions.findings import printable
    from pipeline.versions.requirements import Requirements, read

    result = Requirements()
    for file in arguments.files:  # pip, too, reads included files wherever they lie
        read(Path(), os.fspath(file), result, inside=False)
    rows = [
        {"file": pin.path, "line": pin.line, "name": pin.name, "specifier": pin.specifier, "marker": pin.marker}
        | ({"url": without_login(pin.url)} if pin.url else {})
        for pin in result.pins
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            address = f" @ {row['url']}" if "url" in row else ""
            marker = f" ; {row['marker']}" if row["marker"] else ""
            print(printable(f"{row['file']}:{row['line']}: {row['name'] or ''}{address}{row['specifier']}{marker}"))
    for note in result.notes:
        log.line(f"note: {note.text()}")
    for problem in result.problems:
        log.line(problem.text())
    return int(Exit.USAGE if result.problems else Exit.OK)
