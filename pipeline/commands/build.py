"""`pipeline build MODEL`: resolve, build, warm up, bake, verify, tag."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.request import add_build_options, add_model, add_result_options, request_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_model(parser)
    add_build_options(parser)
    add_result_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Build one image and show what came of it."""
    request = request_from(arguments)
    from pipeline.image.road import build_image

    from .report import summarize

    outcome = build_image(request)
    if arguments.json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    summarize(outcome)
    return 0
