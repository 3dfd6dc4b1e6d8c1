"""`pipeline cache add IMAGE CACHE…`: add caches to an image, a layer each, without building it."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.request import add_result_options


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache add`."""
    parser.add_argument("of", metavar="IMAGE", help="an image in the engine, with /opt/pipeline, torch and FlashInfer")
    parser.add_argument("cache", metavar="CACHE", nargs="+", help="a directory, an image, or oci://…")
    add_result_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Check the caches, add them, verify, tag."""
    from contextlib import ExitStack

    from pipeline.commands.locations import opened
    from pipeline.commands.report import summarize
    from pipeline.image.names import check_image_name, check_reference
    from pipeline.image.request import request_to_add
    from pipeline.image.road import build_image

    check_reference(arguments.of)
    check_image_name(arguments.image)
    with ExitStack() as stack:
        roots = [stack.enter_context(opened(cache)) for cache in arguments.cache]
        timeout = float(arguments.startup_max_wait)
        outcome = build_image(request_to_add(arguments.of, roots, name=arguments.image, timeout=timeout))
    if arguments.json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    summarize(outcome)
    return 0
