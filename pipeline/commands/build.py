"""`pipeline build MODEL`: plan, tune inside the build, bake, verify, tag."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.arguments import add_result_arguments, add_tuning_arguments, request_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `build`."""
    add_tuning_arguments(parser)
    add_result_arguments(parser, "from model, GPU, key")


def execute(arguments: argparse.Namespace) -> int:
    """Build one image and show what came of it."""
    from pipeline.image.flow import build_image
    from pipeline.image.report import show

    outcome = build_image(request_from(arguments))
    if arguments.json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    show(outcome)
    return 0
