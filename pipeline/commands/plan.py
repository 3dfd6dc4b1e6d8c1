"""`pipeline plan MODEL`: say what would be tuned for a model, and write plan.json."""

from __future__ import annotations

import argparse
import json

from pipeline.contract.commandline import path
from pipeline.planning.cli import add_arguments, plan_from
from pipeline.project import root


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="plan.json on stdout instead of a table")
    parser.add_argument("-o", "--output", metavar="FILE", type=path, help="write plan.json to FILE as well")


def execute(arguments: argparse.Namespace) -> int:
    """Make the plan and show it."""
    from pipeline.planning.report import describe

    plan = plan_from(arguments, root())
    if arguments.output is not None:
        from pipeline import log
        from pipeline.contract.errors import UsageError
        from pipeline.contract.files import write_json

        try:
            write_json(arguments.output, plan.to_json())
        except OSError as error:
            raise UsageError(f"{arguments.output}: {error.strerror}", hint="name a file you may write") from None
        log.note(f"wrote {arguments.output}")
    print(json.dumps(plan.to_json(), indent=2) if arguments.json else describe(plan, arguments.model.strip()))
    return 0
