"""`pipeline cache add IMAGE CACHE…`: add caches to an image, a layer each, without building it."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.cli import add_result_options


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache add`."""
    parser.add_argument("of", metavar="IMAGE", help="an image in the engine, with /opt/pipeline, torch and FlashInfer")
    parser.add_argument("cache", metavar="CACHE", nargs="+", help="a directory, an image, or oci://…")
    add_result_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Check the caches, add them, verify, tag."""
    from contextlib import ExitStack

    from pipeline import log
    from pipeline.commands.locations import opened
    from pipeline.image.add import add_caches
    from pipeline.image.names import check_image_name, check_reference
    from pipeline.image.report import verified

    check_reference(arguments.of)
    check_image_name(arguments.image)
    with ExitStack() as stack:
        roots = [stack.enter_context(opened(cache)) for cache in arguments.cache]
        added = add_caches(arguments.of, roots, name=arguments.image, timeout=float(arguments.startup_max_wait))
    if arguments.json:
        json.dump(added.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    for label, value in (("image", added.image), *(("key", key) for key in added.keys)):
        log.line(f"{label:<14} {value}")
    log.line(f"{'verified':<14} {verified(added.verdict)}")
    return 0
