"""`pipeline versions bump`: move a version, and everything that is tied to it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError
from pipeline.contract.exits import Exit


class BadMove(UsageError):
    """An argument is not NAME=VERSION."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions bump`."""
    parser.add_argument("moves", nargs="*", metavar="NAME=VERSION", help="e.g. FLASHINFER_VERSION=0.7.4")
    parser.add_argument("--latest", action="append", default=[], metavar="NAME", help="move to the newest on the index")
    parser.add_argument("--refresh", action="store_true", help="record anew what every pinned package requires")
    parser.add_argument("--dry-run", action="store_true", help="print the diff, write nothing")
    parser.add_argument("--offline", action="store_true", help="ask no index: neither for versions nor for metadata")
    parser.add_argument("--allow-downgrade", action="store_true", help="let a version go down")
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree (default: here)")


def execute(arguments: argparse.Namespace) -> int:
    """Print the unified diff on stdout; write only when everything agrees."""
    from pipeline import log
    from pipeline.contract.files import alone
    from pipeline.versions.bump import Wishes, bump, write
    from pipeline.versions.findings import counted, printable_diff

    values: dict[str, str] = {}
    for text in arguments.moves:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise BadMove(f"{text!r} is not NAME=VERSION", hint="e.g. FLASHINFER_VERSION=0.7.4")
        if name in values:
            raise BadMove(f"{name} is given twice")
        values[name] = value
    both = set(values) & set(arguments.latest)
    if both:
        raise BadMove(f"{min(both)} is given a version and `--latest`")
    if not values and not arguments.latest and not arguments.refresh:
        raise BadMove("nothing to move", hint="`pipeline versions bump NAME=VERSION`, `--latest NAME` or `--refresh`")
    wishes = Wishes(
        values,
        tuple(arguments.latest),
        offline=arguments.offline,
        allow_downgrade=arguments.allow_downgrade,
        refresh=arguments.refresh,
    )
    with alone(arguments.root, lambda: log.note("waiting for another command that changes this tree")):
        outcome = bump(arguments.root, wishes, log.note)
        if not arguments.dry_run:
            write(arguments.root, outcome)  # before anything is said: a reader that goes away ends nothing half done
    for move in outcome.moves:
        log.note(str(move))
    if not outcome.files:
        log.note("nothing changes")
    elif arguments.dry_run:
        log.note(f"{counted(len(outcome.files), 'file')} would change; nothing was written")
    else:
        log.note(f"{counted(len(outcome.files), 'file')} written")
    sys.stdout.write(printable_diff(outcome.diff))
    sys.stdout.flush()
    return int(Exit.OK)
