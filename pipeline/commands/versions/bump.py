"""`pipeline versions bump`: move a version, and everything that is tied to it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions bump`."""
    parser.add_argument("moves", nargs="*", metavar="NAME=VERSION", help="e.g. FLASHINFER_VERSION=0.7.4")
    parser.add_argument("--latest", action="append", default=[], metavar="NAME", help="move to the newest on the index")
    parser.add_argument("--refresh", action="store_true", help="compile every lock again; pins stay where they can")
    parser.add_argument(
        "--upgrade", action="append", default=[], metavar="PACKAGE", help="let its pins move to the newest; * is all"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the diff, write nothing")
    parser.add_argument("--offline", action="store_true", help="ask no index; refused where a lock must be compiled")
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree (default: here)")


def execute(arguments: argparse.Namespace) -> int:
    """Print the unified diff on stdout; write only when everything agrees."""
    from pipeline import log
    from pipeline.contract.files import alone
    from pipeline.versions.bump import BumpRequest, bump, write_all
    from pipeline.versions.findings import counted, printable, printable_diff

    values: dict[str, str] = {}
    for text in arguments.moves:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UsageError(
                f"{text!r} is not NAME=VERSION", hint="e.g. `pipeline versions bump FLASHINFER_VERSION=0.7.4`"
            )
        if name in values or name in arguments.latest:
            raise UsageError(f"{name} is given twice")
        values[name] = value
    if not (values or arguments.latest or arguments.refresh or arguments.upgrade):
        raise UsageError("nothing to move", hint="NAME=VERSION, --latest NAME, --upgrade PACKAGE or --refresh")
    request = BumpRequest(
        values,
        tuple(arguments.latest),
        refresh=arguments.refresh,
        upgrade=tuple(arguments.upgrade),
        offline=arguments.offline,
    )
    with alone(arguments.root, lambda: log.note("waiting for another command that changes this tree")):
        outcome = bump(arguments.root, request, log.note)
        if not arguments.dry_run:
            write_all(arguments.root, outcome)  # first: a reader that goes away ends nothing half done
    for move in outcome.moves:
        log.note(printable(move))
    changes = counted(len(outcome.files), "file")
    if not outcome.files:
        log.note("nothing changes")
    else:
        log.note(f"{changes} would change; nothing was written" if arguments.dry_run else f"{changes} written")
    sys.stdout.write(printable_diff(outcome.diff))
    sys.stdout.flush()
    return int(Exit.OK)
