"""`pipeline cache add IMAGE CACHE…`: add caches to an image, a layer each, without building it."""

from __future__ import annotations

import argparse

from pipeline.image.arguments import add_gpus, add_result_arguments, add_store, retune_request


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache add`."""
    parser.add_argument("of", metavar="IMAGE", help="an image in the engine, with /opt/pipeline, torch and FlashInfer")
    parser.add_argument("cache", metavar="CACHE", nargs="+", help="a directory, an image, or oci://…")
    add_gpus(parser)
    add_store(parser)
    add_result_arguments(parser, "from model, GPU, key")


def execute(arguments: argparse.Namespace) -> int:
    """Judge the caches, add them, verify, tag."""
    from contextlib import ExitStack

    from pipeline.commands.locations import opened
    from pipeline.image.report import show_changed
    from pipeline.image.retune import graft
    from pipeline.image.settings import check_reference

    check_reference(arguments.of)
    with ExitStack() as stack:
        roots = [stack.enter_context(opened(cache)) for cache in arguments.cache]
        show_changed(graft(arguments.of, roots, retune_request(arguments)), as_json=arguments.json)
    return 0
