"""`pipeline init DIR`: begin a project of one's own."""

from __future__ import annotations

import argparse
import shlex

from pipeline.contract.commandline import path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add DIR."""
    parser.add_argument("folder", type=path, metavar="DIR", help="a new or empty folder")


def execute(arguments: argparse.Namespace) -> int:
    """Write the files and say what to type next."""
    from pipeline import log
    from pipeline.project import create

    written = create(arguments.folder)
    log.note(f"wrote {len(written)} files: versions.json, templates/, docker/, requirements/, Makefile, a workflow")
    log.note(f"next: cd {shlex.quote(str(arguments.folder))}; pipeline versions check; pipeline build tiny")
    return 0
