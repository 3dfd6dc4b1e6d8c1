"""`pipeline versions pins`: the requirements of requirements files, those that they include among them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.versions.tree import Tree


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions pins`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a requirements file")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, name, specifier, marker")


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per requirement; 2 where a file or a line cannot be read."""
    from pipeline.versions.findings import printable
    from pipeline.versions.requirements import Requirements, read

    tree = _everywhere(arguments.files)
    result = Requirements()
    for file in arguments.files:
        read(tree, _inside(file), result)
    rows = [
        {
            "file": tree.shown(pin.path),
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
            print(printable(f"{row['file']}:{row['line']}: {row['name'] or ''}{address}{row['specifier']}{marker}"))
    for said, what in (("note: ", result.notes), ("", result.problems)):
        for one in what:
            log.line(f"{said}{one._replace(path=tree.shown(one.path)).text()}")
    return int(Exit.USAGE if result.problems else Exit.OK)


def _inside(file: Path) -> str:
    """A path as seen from the root of the file system: pip, too, reads included files wherever they lie."""
    return os.path.relpath(file.absolute(), "/")


def _everywhere(files: Sequence[Path]) -> Tree:
    from pipeline.versions.tree import Tree

    given = {_inside(file): str(file) for file in files}
    absolute = all(file.is_absolute() for file in files)

    class Everywhere(Tree):
        def shown(self, path: str) -> str:
            """As it was given; an included file in the manner of the files that were given."""
            return given.get(path) or (f"/{path}" if absolute else os.path.relpath(f"/{path}"))

    return Everywhere(Path("/"))
