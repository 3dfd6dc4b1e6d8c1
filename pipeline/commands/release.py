"""`pipeline release`: from a matrix, or models, to verified images in a registry."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.contract.bounds import seconds
from pipeline.contract.commandline import path
from pipeline.contract.exits import Exit
from pipeline.image.arguments import ROOT, add_tuning_options, request_from

if TYPE_CHECKING:
    from pipeline.contract.errors import PipelineError
    from pipeline.image.request import Request
    from pipeline.release.ask import Ask
    from pipeline.release.cells import Cell
    from pipeline.release.matrixfile import MatrixFile


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `release`."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="one cell each; with --matrix: only its cells of these"
    )
    group = parser.add_argument_group("release")
    group.add_argument("--registry", default="", metavar="R", help="host[:port][/repository] (repository: tuned)")
    group.add_argument("--matrix", type=path, metavar="FILE", help="release.toml: models, TP, GPU types, engines")
    group.add_argument("--tag", default="", metavar="TEMPLATE", help="of tags that never move; {cache} is one field")
    group.add_argument("--move-tag", action="append", default=[], metavar="TEMPLATE", help="a tag that moves along")
    group.add_argument("--verdict", action="append", default=[], type=path, metavar="FILE|DIR", help="of other hosts")
    group.add_argument(
        "--sign", default="", metavar="KEY", help="cosign.key or env://NAME; its password: COSIGN_PASSWORD"
    )
    group.add_argument("--dry-run", action="store_true", help="say what would be pushed; push and build nothing")
    group.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    group.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of start and replay at verify"
    )
    add_tuning_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Release, and show what came of it, also when that was interrupted."""
    from pipeline.release.flow import Release
    from pipeline.release.report import show

    ask, cells = _asked(arguments)
    run = Release(ask, cells)
    code = int(Exit.INTERNAL)
    try:
        run.run()
        code = run.summary().code
    finally:
        if run.rows:
            summary = run.summary()
            if arguments.json:
                json.dump(summary.to_json(), sys.stdout, indent=2)
                sys.stdout.write("\n")
            show(summary)
    return code


def _asked(arguments: argparse.Namespace) -> tuple[Ask, list[tuple[Cell, Request | PipelineError]]]:
    """Everything that can be wrong with the settings is said here, before any work."""
    from pipeline.contract.errors import UsageError
    from pipeline.release.annotate import check_own
    from pipeline.release.ask import Ask, place_from
    from pipeline.release.cells import cross, refuse_same_names, single
    from pipeline.release.matrixfile import read_matrix
    from pipeline.release.names import check_template
    from pipeline.release.sign import Signer, check_name
    from pipeline.release.verdicts import read_verdicts

    matrix: MatrixFile | None = read_matrix(arguments.matrix) if arguments.matrix is not None else None
    if matrix is None and not arguments.models:
        hint = "MODEL=tiny, or a matrix of cells: --matrix release.toml (MATRIX=…)"
        raise UsageError("nothing to release was named", hint=hint)
    ask = Ask(
        root=ROOT,
        place=place_from(arguments.registry or (matrix.registry if matrix and matrix.registry else "")),
        template=arguments.tag or (matrix.tag if matrix and matrix.tag else ""),
        moves=tuple(arguments.move_tag or (matrix.move if matrix and matrix.move else ())),
        own=check_own(matrix.annotations if matrix else {}),
        signer=Signer(arguments.sign) if arguments.sign else None,
        dry_run=arguments.dry_run,
        again=arguments.retune,
    )
    for template in (ask.template, *ask.moves):
        if template:
            check_template(template)
    read_verdicts(arguments.verdict)
    if ask.signer is not None:
        check_name(ask.place)
    if ask.signer is not None and not ask.dry_run:
        ask = replace(ask, signed_by=ask.signer.open())
    if matrix is None:
        said = arguments.tp, arguments.cache, arguments.verdict, arguments.engine
        cells = [single(model, *said) for model in arguments.models]
    else:
        cells = cross(matrix, arguments.matrix, models=arguments.models, verdicts=arguments.verdict)
    refuse_same_names(cells, ask.template_of)
    return ask, _requests(arguments, cells)


def _requests(arguments: argparse.Namespace, cells: list[Cell]) -> list[tuple[Cell, Request | PipelineError]]:
    """The request of each cell; every cell that cannot be planned is named, all of them at once.

    Caches that are missing or unsound are no fault of the settings: such a cell fails alone, with this error.
    """
    from pipeline.contract.errors import CacheRefused, UsageError
    from pipeline.image.caches import CacheMissing
    from pipeline.release.faults import CellsInvalid

    made: list[tuple[Cell, Request | PipelineError]] = []
    wrong: list[str] = []
    for cell in cells:
        one = copy.copy(arguments)
        for name, value in {**cell.settings, "model": cell.model, "cache": cell.caches, "image": ""}.items():
            setattr(one, name, value)
        if cell.caches:  # --retune and --tune-in are for the cells that tune
            one.retune, one.tune_in = False, ""
        try:
            made.append((cell, request_from(one)))
        except (CacheMissing, CacheRefused) as error:
            made.append((cell, error))
        except UsageError as error:
            if len(cells) == 1:
                raise
            said = [error.message] if not error.details else list(error.details)
            wrong += [f"{cell.title}: {line}" for line in said]
    if wrong:
        raise CellsInvalid(f"{len(wrong)} settings of the cells are wrong: {wrong[0]}", details=wrong)
    return made
