"""`pipeline versions check`: prove that every version agrees with versions.json."""

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
        "--format", choices=("text", "json", "github"), default="text", help="how findings are printed (default: text)"
    )
    parser.add_argument(
        "--online", action="store_true", help="ask the index that pip is configured for what packages require"
    )
    parser.add_argument("--fix", action="store_true", help="run `pipeline versions sync` first")


def execute(arguments: argparse.Namespace) -> int:
    """Print every finding on stdout; 3 where there are any, 2 where versions.json or a template cannot be read."""
    from pipeline import log
    from pipeline.versions.check import check
    from pipeline.versions.findings import counted, printable, render
    from pipeline.versions.source import FILE, SourceInvalid, load
    from pipeline.versions.templates import FOLDER, TemplatesInvalid, has_templates

    try:
        if arguments.fix and has_templates(arguments.root):
            from pipeline.contract.files import alone
            from pipeline.versions.sync import sync

            with alone(arguments.root, lambda: log.note("waiting for another command that changes this tree")):
                written = sync(arguments.root, load(arguments.root))
            for path in written:
                log.note(f"wrote {printable(path)}")
        if arguments.online:
            from pipeline.versions.online import check_online

            result = check_online(arguments.root, log.note)
        else:
            result = check(arguments.root)
    except (SourceInvalid, TemplatesInvalid) as error:
        sys.stdout.write(render(error.findings, arguments.format))
        what = FILE if isinstance(error, SourceInvalid) else f"{FOLDER}/"
        log.stop(f"{what} cannot be used: {counted(len(error.findings), 'error')}", error.hint)
        return int(Exit.USAGE)
    findings = result.findings
    sys.stdout.write(render(findings, arguments.format))
    for note in result.notes:
        log.note(f"note: {note.text()}")
    if findings:
        log.note(counted(len(findings), "finding"))
        if result.unusable:
            log.stop(
                f"{FOLDER}/ cannot be used: see above",
                f"correct {FOLDER}/ or {FILE}, then run `pipeline versions sync`",
            )
            return int(Exit.USAGE)
        return int(Exit.DRIFT)
    log.note("every version agrees with versions.json")
    return int(Exit.OK)
