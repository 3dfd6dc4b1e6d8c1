"""`pipeline versions …`: check, sync, bump, usages, args, pins."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.contract.commandline import path, some
from pipeline.contract.errors import Exit, UsageError
from pipeline.contract.text import pluralize, without_login


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=path, default=Path(), metavar="DIR", help="the tree (default: here)")


@contextmanager
def _changing(root: Path) -> Iterator[None]:
    """Alone among the commands that change a tree."""
    from pipeline import log
    from pipeline.contract.files import alone

    with alone(root, lambda: log.note("waiting for another command that changes this tree")):
        yield


def _print(rows: Sequence[object], lines: Sequence[str], *, as_json: bool) -> None:
    """Rows as JSON, or a line for each."""
    from pipeline.versions.findings import printable

    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


# ---- check, sync


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions check`."""
    _add_root(parser)
    parser.add_argument(
        "--versions",
        type=some,
        default="versions.json",
        metavar="FILE",
        help="its versions file (default: versions.json)",
    )
    parser.add_argument(
        "--format", choices=("text", "json", "github"), default="text", help="how findings are printed (default: text)"
    )
    parser.add_argument("--fix", action="store_true", help="run `pipeline versions sync` first")


def execute_check(arguments: argparse.Namespace) -> int:
    """Print every finding on stdout; 3 where there are any, 2 where versions.json or a template cannot be read."""
    from pipeline import log
    from pipeline.versions.check import check
    from pipeline.versions.findings import printable, render
    from pipeline.versions.render import TemplatesInvalid, has_templates, sync
    from pipeline.versions.source import SourceInvalid, load

    try:
        if arguments.fix and has_templates(arguments.root):
            with _changing(arguments.root):
                for name in sync(arguments.root, load(arguments.root, arguments.versions)):
                    log.note(f"wrote {printable(name)}")
        result = check(arguments.root, arguments.versions)
    except (SourceInvalid, TemplatesInvalid) as error:
        sys.stdout.write(render(error.findings, arguments.format))
        log.stop(f"{error.subject} cannot be used: {pluralize(len(error.findings), 'error')}", error.hint)
        return int(Exit.USAGE)
    sys.stdout.write(render(result.findings, arguments.format))
    for note in result.notes:
        log.note(f"note: {printable(note)}")
    if result.unusable:
        log.stop("templates/ cannot be used: see above", "correct it, then run `pipeline versions sync`")
        return int(Exit.USAGE)
    if result.findings:
        log.note(pluralize(len(result.findings), "finding"))
        return int(Exit.DRIFT)
    log.note(f"every version agrees with {printable(arguments.versions)}")
    return int(Exit.OK)


configure_sync = _add_root


def execute_sync(arguments: argparse.Namespace) -> int:
    """Write what changed, whole; print the path of each changed file; delete nothing."""
    from pipeline import log
    from pipeline.versions import load
    from pipeline.versions.render import sync

    with _changing(arguments.root):
        changed = sync(arguments.root, load(arguments.root))
    _print(changed, changed, as_json=False)
    log.note(f"{pluralize(len(changed), 'file')} changed" if changed else "every rendered file is up to date")
    return int(Exit.OK)


# ---- bump


def configure_bump(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions bump`."""
    parser.add_argument("moves", nargs="*", metavar="NAME=VERSION", help="e.g. FLASHINFER_VERSION=0.7.4")
    parser.add_argument("--latest", action="append", default=[], metavar="NAME", help="move to the newest on the index")
    parser.add_argument("--refresh", action="store_true", help="compile every lock again; pins stay where they can")
    parser.add_argument(
        "--upgrade",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="let the pins of PACKAGE move to the newest; * is all",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the diff, write nothing")
    parser.add_argument("--offline", action="store_true", help="ask no index; refused where a lock must be compiled")
    _add_root(parser)


def execute_bump(arguments: argparse.Namespace) -> int:
    """Print the unified diff on stdout; write only when everything agrees."""
    from pipeline import log
    from pipeline.versions.bump import BumpRequest, bump, write_all
    from pipeline.versions.findings import printable, printable_diff

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
    with _changing(arguments.root):
        outcome = bump(arguments.root, request, log.note)
        if not arguments.dry_run:
            write_all(arguments.root, outcome)  # first: a reader that goes away ends nothing half done
    for move in outcome.moves:
        log.note(printable(move))
    changes = pluralize(len(outcome.files), "file")
    if not outcome.files:
        log.note("nothing changes")
    else:
        log.note(f"{changes} would change; nothing was written" if arguments.dry_run else f"{changes} written")
    sys.stdout.write(printable_diff(outcome.diff))
    sys.stdout.flush()
    return int(Exit.OK)


# ---- usages, args, pins


def configure_usages(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions usages`."""
    parser.add_argument("name", metavar="NAME", help="e.g. FLASHINFER_VERSION")
    parser.add_argument("--json", action="store_true", help="print an array of path, line, name, kind, text, wrong")
    _add_root(parser)


def execute_usages(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per place."""
    from pipeline.versions.check import in_words, usages
    from pipeline.versions.findings import suggest
    from pipeline.versions.source import FILE, canonical, load

    versions = load(arguments.root)
    if arguments.name not in versions:
        governor = versions.packages().get(canonical(arguments.name))
        said = f"{arguments.name} is governed by {governor}: `pipeline versions usages {governor}`" if governor else ""
        hint = said or suggest(arguments.name, versions).removeprefix("; ") or f"names stand in {FILE}"
        raise UsageError(f"{FILE} has no {arguments.name}", hint=hint)
    found = usages(arguments.root, versions, arguments.name)
    _print([one._asdict() for one in found], [in_words(one) for one in found], as_json=arguments.json)
    return int(Exit.OK)


def configure_args(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions args`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a Dockerfile")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, stage, name, value")


def execute_args(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per ARG; 2 where a file cannot be read or BuildKit would refuse it."""
    from pipeline import log
    from pipeline.versions.dockerfile import read
    from pipeline.versions.findings import printable
    from pipeline.versions.requirements import read_bytes

    rows, lines, problems = [], [], []
    for file in arguments.files:
        try:
            text = read_bytes(file).decode()
        except UnicodeDecodeError:
            problems.append(f"{file}: is not UTF-8")
            continue
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
            continue
        found = read(text)
        problems += [f"{file}:{problem.line}: {problem.message}" for problem in found.problems]
        for arg in found.args:
            rows.append({"file": str(file), "line": arg.line, "stage": arg.stage, "name": arg.name, "value": arg.value})
            stage = "" if arg.stage is None else f" [{arg.stage}]"
            value = "" if arg.value is None else f"={arg.value}"
            lines.append(f"{file}:{arg.line}:{stage} {arg.name}{value}")
    _print(rows, lines, as_json=arguments.json)
    for problem in problems:
        log.line(printable(problem))
    return int(Exit.USAGE if problems else Exit.OK)


def configure_pins(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeline versions pins`."""
    parser.add_argument("files", nargs="+", type=path, metavar="FILE", help="a requirements file")
    parser.add_argument("--json", action="store_true", help="print an array of file, line, name, specifier, marker")


def execute_pins(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per requirement, of included files too; 2 where a file or line is unreadable."""
    from pipeline import log
    from pipeline.versions.requirements import Requirements, read

    result = Requirements()
    for file in arguments.files:  # pip, too, reads included files wherever they lie
        read(Path(), os.fspath(file), result, inside=False)
    rows, lines = [], []
    for pin in result.pins:
        url = without_login(pin.url)
        row = {"file": pin.path, "line": pin.line, "name": pin.name, "specifier": pin.specifier, "marker": pin.marker}
        rows.append(row | ({"url": url} if url else {}))
        address, marker = f" @ {url}" if url else "", f" ; {pin.marker}" if pin.marker else ""
        lines.append(f"{pin.path}:{pin.line}: {pin.name or ''}{address}{pin.specifier}{marker}")
    _print(rows, lines, as_json=arguments.json)
    for note in result.notes:
        log.line(f"note: {note.text()}")
    for problem in result.problems:
        log.line(problem.text())
    return int(Exit.USAGE if result.problems else Exit.OK)
