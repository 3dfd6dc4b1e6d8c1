"""`pipeline image MODEL`: plan, tune inside the build, bake, verify, name."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.arguments import add_tuning_arguments, request_from, seconds


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `image`."""
    add_tuning_arguments(parser)
    parser.add_argument("--image", default="", metavar="NAME", help="name of the image (default: from model, GPU, key)")
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of start and replay at verify"
    )
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")


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
