"""`pipeline versions args`: the ARGs of Dockerfiles, with the values that BuildKit gives them."""

from __future__ import annotations

import argparse
import codecs
import json
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.versions.dockerfile import Frontend

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class BadFrontend(UsageError):
    """`--frontend` is not a version."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions args`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a Dockerfile")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, stage, name, value")
    parser.add_argument(
        "--frontend",
        metavar="X.Y",
        help="read as this version of docker/dockerfile does, or `newest`"
        " (default: the file's `# syntax=` line, else 1.7, which Docker Engine 26.1 has built in)",
    )
    machine = _MACHINES.get(platform.machine(), platform.machine())
    parser.add_argument(
        "--platform", default=f"linux/{machine}", help="what TARGETPLATFORM and its kin are (default: %(default)s)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per ARG; 2 where a file cannot be read or BuildKit would refuse it."""
    from pipeline.versions.dockerfile import read
    from pipeline.versions.findings import printable
    from pipeline.versions.tree import ordinary, refusal

    rows: list[dict[str, str | int | None]] = []
    refused: list[str] = []
    frontend = _frontend(arguments.frontend)
    for file in arguments.files:
        try:
            data = Path(ordinary(file)).read_bytes()
        except OSError as error:
            refused.append(f"{file}: {refusal(error)}")
            continue
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            refused.append(f"{file}: is UTF-16, which BuildKit does not read")
            continue
        if b"\0" in data:
            refused.append(f"{file}: is no text")
            continue
        text = data.decode("utf-8", "replace")
        found = read(text, frontend=frontend, platform=arguments.platform)
        rows += [
            {"file": str(file), "line": arg.line, "stage": arg.stage, "name": arg.name, "value": arg.value}
            for arg in found.args
        ]
        refused += [f"{file}:{problem.line}: {problem.message}" for problem in found.problems]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            stage = "" if row["stage"] is None else f" [{row['stage']}]"
            value = "" if row["value"] is None else f"={row['value']}"
            print(printable(f"{row['file']}:{row['line']}:{stage} {row['name']}{value}"))
    for line in refused:
        sys.stderr.write(printable(line) + "\n")
    return int(Exit.USAGE if refused else Exit.OK)


def _frontend(text: str | None) -> Frontend | None:
    from pipeline.versions.dockerfile import NEWEST, Frontend

    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(?:\.\d+)?", text)
    if found is None and text != "newest":
        raise BadFrontend(
            f"{text!r} is not a version of docker/dockerfile", hint="--frontend 1.7, or --frontend newest"
        )
    return Frontend(int(found[1]), int(found[2])) if found else NEWEST
