"""`pipeline versions args`: the ARGs of Dockerfiles, with their values, as BuildKit reads them."""

from __future__ import annotations

import argparse
import json
import platform

from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit

_LARGEST = 4 << 20  # bytes
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions args`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a Dockerfile")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, stage, name, value")
    machine = _MACHINES.get(platform.machine(), platform.machine())
    parser.add_argument(
        "--platform", default=f"linux/{machine}", help="what TARGETPLATFORM and its kin are (default: %(default)s)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per ARG; 2 where a file cannot be read or BuildKit would refuse it."""
    from pipeline import log
    from pipeline.versions.dockerfile import read
    from pipeline.versions.findings import printable

    rows, problems = [], []
    for file in arguments.files:
        try:
            if file.exists() and not file.is_file():
                raise OSError(0, "no ordinary file")
            if file.stat().st_size > _LARGEST:
                raise OSError(0, "larger than 4 MiB")
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            problems.append(f"{file}: is not UTF-8")
            continue
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
            continue
        found = read(text, platform=arguments.platform)
        problems += [f"{file}:{problem.line}: {problem.message}" for problem in found.problems]
        rows += [
            {"file": str(file), "line": arg.line, "stage": arg.stage, "name": arg.name, "value": arg.value}
            for arg in found.args
        ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            stage = "" if row["stage"] is None else f" [{row['stage']}]"
            value = "" if row["value"] is None else f"={row['value']}"
            print(printable(f"{row['file']}:{row['line']}:{stage} {row['name']}{value}"))
    for problem in problems:
        log.line(printable(problem))
    return int(Exit.USAGE if problems else Exit.OK)
