"""`pipeline tune MODEL`: warm-up caches in the host's store, without an image around them."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.request import add_build_options, add_model, request_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    add_model(parser)
    add_build_options(parser)
    parser.add_argument("--json", action="store_true", help="root, keys and seconds as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Warm up, or find the caches in the store; print the cache root."""
    request = request_from(arguments)
    from pipeline import log
    from pipeline.contract.places import CACHE_ROOT
    from pipeline.image.names import KEY
    from pipeline.image.road import warm_up_only

    inputs, warm, reused = warm_up_only(request)
    root = warm.root / CACHE_ROOT.lstrip("/") if inputs.producer.name == "tune" else warm.root
    keys = warm.labels.get(KEY, "").split(",")
    if arguments.json:
        value = {"root": str(root), "key": keys[0], "keys": keys, "seconds": warm.seconds, "reused": reused}
        json.dump({**value, "inputs": inputs.digest}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(root)
    log.note(f"{', '.join(keys)}: {'found in the store' if reused else f'made in {warm.seconds:.1f} s'}")
    return 0
