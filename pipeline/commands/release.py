"""`pipeline release cells|run|finish`: from a matrix, or models, to verified images in a registry."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.commandline import path, seconds
from pipeline.contract.errors import Exit

if TYPE_CHECKING:
    from pipeline.registry.reference import Reference
    from pipeline.release.matrix import Cell, Matrix
    from pipeline.release.run import Job, Options, Release


def configure_cells(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `release cells`."""
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help="as JSON on stdout, for a CI system's matrix of jobs")


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `release run`."""
    _add_common(parser)
    parser.add_argument("--cell", action="append", default=[], metavar="NAME", help="this cell alone (may be repeated)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be pushed; push and build nothing")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    parser.add_argument(
        "--compression", choices=("gzip", "zstd"), default="gzip", help="compression of all layers (default: gzip)"
    )
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="timeout of each start at verify, in s"
    )


def configure_finish(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `release finish`."""
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")


def _add_common(parser: argparse.ArgumentParser) -> None:
    """What all three must be given alike: it decides which cells there are, and what their inputs are."""
    from pipeline.image.request import add_build_options

    parser.add_argument("models", nargs="*", metavar="MODEL", help="one cell each; not with --matrix")
    group = parser.add_argument_group("release")
    group.add_argument("--registry", default="", metavar="R", help="host[:port][/repository] (repository: tuned)")
    group.add_argument("--matrix", type=path, metavar="FILE", help="release.toml: models, TP, GPU types, servers")
    group.add_argument(
        "--tag", default="", metavar="TEMPLATE", help="template of tags, which never move; {cache} is one field"
    )
    group.add_argument(
        "--floating-tag",
        action="append",
        default=[],
        metavar="TEMPLATE",
        help="template of tags that move to the newest image",
    )
    group.add_argument(
        "--verdict", action="append", default=[], type=path, metavar="FILE|DIR", help="verdicts of other hosts"
    )
    group.add_argument(
        "--sign",
        default="",
        metavar="KEY",
        help="cosign.key, env://NAME, an address of a KMS (awskms://…), or keyless; a password: COSIGN_PASSWORD",
    )
    group.add_argument("--transparency-log", action="store_true", help="write signatures to the public log")
    add_build_options(parser)


def execute_cells(arguments: argparse.Namespace) -> int:
    """List the cells, and what the registry has of them; 7 where a cell's caches are missing."""
    from pipeline.registry.client import Registry

    release = _prepared(arguments)
    with Registry(release.options.place.registry) as registry:
        rows = release.cells(registry, ["pipeline", "release", "run", *_spelled(arguments)])
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            state = "released" if row["released"] else row["error"] or "missing"
            print(f"{row['name']}\t{row['device']}\t{state}")
    for job in release.jobs:
        if job.error is not None:
            log.warn(f"{job.cell.name}: {job.error.message}")
    return max((int(job.error.exit_code) for job in release.jobs if job.error is not None), default=int(Exit.OK))


def execute_run(arguments: argparse.Namespace) -> int:
    """Release cells, and show what came of it, also when that was interrupted."""
    release = _prepared(arguments, sign=not arguments.dry_run)
    code = int(Exit.INTERNAL)
    try:
        release.run(arguments.cell, dry_run=arguments.dry_run)
        if not arguments.cell and not arguments.dry_run:
            done = [job for job in release.jobs if release.rows[job.cell.name].status != "failed"]
            release.finish([job.cell.group for job in done])
        code = release.summary().code
    finally:
        if release.rows:
            _show(release, arguments)
    return code


def execute_finish(arguments: argparse.Namespace) -> int:
    """Make indexes, give tags and move floating ones; exit 8 with the list of cells that are missing."""
    release = _prepared(arguments)
    release.finish()
    _show(release, arguments)
    return release.summary().code


def _show(release: Release, arguments: argparse.Namespace) -> None:
    summary = release.summary()
    if arguments.json:
        json.dump(summary.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    summary.show()


def _prepared(arguments: argparse.Namespace, *, sign: bool = True) -> Release:
    """The release. Everything that can be wrong with the settings is said here."""
    from pipeline.contract.errors import UsageError
    from pipeline.release import cosign, verdicts
    from pipeline.release.building import cell_options
    from pipeline.release.matrix import read_matrix, single
    from pipeline.release.run import Options, Release

    matrix: Matrix | None = None
    cells: tuple[Cell, ...]
    if arguments.matrix is not None:
        given = [name for name, default in cell_options().items() if getattr(arguments, name) != default]
        given += ["MODEL"] if arguments.models else []
        if given:
            names = ", ".join(name if name == "MODEL" else f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(
                f"{names}: with --matrix the matrix says what an image is",
                hint="write it into the cells; --cell NAME chooses among them",
            )
        matrix, cells = read_matrix(arguments.matrix)
    else:
        if not arguments.models:
            raise UsageError("nothing to release was named", hint="a MODEL, or --matrix release.toml (MATRIX=…)")
        if arguments.cache is None:
            raise UsageError("CACHE= names no directory", hint="CACHE=dir or CACHE=dir1,dir2")
        named = {name: value for name in ("device", "arch") if (value := getattr(arguments, name).strip())}
        cells = tuple(single(model, arguments.tp, caches=arguments.cache, settings=named) for model in arguments.models)
        if len({cell.name for cell in cells}) < len(cells):
            raise UsageError("a model was named twice")
    signer = cosign.Signer(arguments.sign, arguments.transparency_log) if arguments.sign else None
    options = Options(
        place=_place(arguments.registry or (matrix.registry if matrix and matrix.registry else "")),
        template=arguments.tag or (matrix.tag if matrix and matrix.tag else ""),
        floating=tuple(arguments.floating_tag or (matrix.floating if matrix and matrix.floating else ())),
        annotations=matrix.annotations if matrix else {},
        signer=signer,
        verdicts=tuple(arguments.verdict),
        compression="zstd" if getattr(arguments, "compression", "") == "zstd" else "",
        again=arguments.retune,
    )
    verdicts.read_files(arguments.verdict)
    if signer is not None and sign:
        signer.check()
    return Release(options, _jobs(arguments, cells, options))


def _spelled(arguments: argparse.Namespace) -> list[str]:
    """The words that give these arguments again."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_common(parser)
    words = list(arguments.models)
    for action in parser._actions:
        value = getattr(arguments, action.dest)
        if not action.option_strings or value == action.default:
            continue
        option = action.option_strings[-1]
        if action.nargs == 0:
            words.append(option)
        elif isinstance(value, list):
            words += [word for one in value for word in (option, str(one))]
        else:
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def _jobs(arguments: argparse.Namespace, cells: tuple[Cell, ...], options: Options) -> list[Job]:
    """Each cell with its request; every cell that cannot be planned is named, all of them at once."""
    from pipeline.contract.errors import CacheRefused, UsageError
    from pipeline.release.building import inputs_of, request_of
    from pipeline.release.run import Job, clashes

    made: list[Job] = []
    wrong = list(dict.fromkeys(clashes(options, cells)))
    hint = ""
    arguments.startup_max_wait = getattr(arguments, "startup_max_wait", 1200)
    for cell in cells:
        try:
            request = request_of(arguments, cell)
            made.append(Job(cell, request, inputs_of(request, cell, options.annotations)))
        except CacheRefused as error:  # missing or unsound: no fault of the settings
            made.append(Job(cell, error=error))
        except UsageError as error:
            if len(cells) == 1 and not wrong:
                raise
            hint = hint or error.hint
            wrong += [f"{cell.name}: {line}" for line in error.details or (error.message,)]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        hint = hint or "docs/reference/release.md has the fields of tags and the keys of release.toml"
        raise UsageError(f"{wrong[0]}{more}", details=wrong if len(wrong) > 1 else (), hint=hint)
    return made


def _place(text: str) -> Reference:
    """`host[:port][/repository]`; raise `UsageError`."""
    from pipeline.contract.errors import UsageError
    from pipeline.registry.reference import Reference

    text = text.strip().rstrip("/")
    if not text:
        raise UsageError("no registry was named", hint="--registry registry.example:5000/team/tuned (REGISTRY=…)")
    found = Reference.in_registry(text if "/" in text else f"{text}/tuned")
    if found.tag or found.digest:
        raise UsageError(f"{text} is an image; its tag is made by the template", hint=f"--registry {found.name}")
    return found
