"""`pipeline versions check`: prove, offline, that every version agrees with versions.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions check`."""
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree to check (default: here)")
    parser.add_argument(
        "--versions", default="versions.json", metavar="FILE", help="its versions file (default: versions.json)"
    )
    parser.add_argument(
        "--format", choices=("text", "json", "github"), default="text", help="how findings are printed (default: text)"
    )
    parser.add_argument("--fix", action="store_true", help="run `pipeline versions sync` first")


def execute(arguments: argparse.Namespace) -> int:
    """Print every finding on stdout; 3 where there are any, 2 where versions.json or a template cannot be read."""
    from pipeline import log
    from pipeline.contract.files import alone
    from pipeline.versions.check import check
    from pipeline.versions.findings import counted, printable, render
    from pipeline.versions.render import TemplatesInvalid, has_templates, sync
    from pipeline.versions.source import SourceInvalid, load

    try:
        if arguments.fix and has_templates(arguments.root):
            with alone(arguments.root, lambda: log.note("waiting for another command that changes this tree")):
                written = sync(arguments.root, load(arguments.root, arguments.versions))
            for name in written:
                log.note(f"wrote {printable(name)}")
        result = check(arguments.root, arguments.versions)
    except (SourceInvalid, TemplatesInvalid) as error:
        sys.stdout.write(render(error.findings, arguments.format))
        log.stop(f"{error.subject} cannot be used: {counted(len(error.findings), 'error')}", error.hint)
        return int(Exit.USAGE)
    sys.stdout.write(render(result.findings, arguments.format))
    for note in result.notes:
        log.note(f"note: {printable(note)}")
    if result.unusable:
        log.stop("templates/ cannot be used: see above", "correct it, then run `pipeline versions sync`")
        return int(Exit.USAGE)
    if result.findings:
        log.note(counted(len(result.findings), "finding"))
        return int(Exit.DRIFT)
    log.note(f"every version agrees with {printable(arguments.versions)}")
    return int(Exit.OK)
