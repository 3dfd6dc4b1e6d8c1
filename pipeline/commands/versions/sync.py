"""`pipeline versions sync`: render docker/ and requirements/ from versions.json and templates/."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions sync`."""
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree to render (default: here)")


def execute(arguments: argparse.Namespace) -> int:
    """Write what changed, whole; print the path of each changed file; delete nothing."""
    from pipeline import log
    from pipeline.contract.files import alone
    from pipeline.versions import load
    from pipeline.versions.findings import counted, printable
    from pipeline.versions.render import sync

    with alone(arguments.root, lambda: log.note("waiting for another command that changes this tree")):
        changed = sync(arguments.root, load(arguments.root))
    for name in changed:
        print(printable(name))
    log.note(f"{counted(len(changed), 'file')} changed" if changed else "every rendered file is up to date")
    return int(Exit.OK)
