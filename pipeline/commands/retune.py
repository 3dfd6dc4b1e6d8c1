"""`pipeline retune IMAGE`: tune a tuned image again; only its cache layer is another one afterwards."""

from __future__ import annotations

import argparse

from pipeline.image.arguments import add_rank_arguments, add_result_arguments, add_store, retune_request


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `retune`."""
    parser.add_argument("of", metavar="IMAGE", help="a tuned image in the engine")
    add_rank_arguments(parser.add_argument_group("tuning"))
    add_store(parser)
    add_result_arguments(parser, "IMAGE itself")


def execute(arguments: argparse.Namespace) -> int:
    """Tune again, put the layer in the old one's place, verify, name."""
    from pipeline.image.report import show_changed
    from pipeline.image.retune import retune
    from pipeline.image.settings import check_reference

    check_reference(arguments.of)
    show_changed(retune(arguments.of, retune_request(arguments)), as_json=arguments.json)
    return 0
