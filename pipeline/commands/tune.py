"""`pipeline tune MODEL`: a tuned cache in the host's store, without an image around it."""

from __future__ import annotations

import argparse
import json
import sys

from pipeline.image.arguments import add_tuning_arguments, request_from


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    add_tuning_arguments(parser)
    parser.add_argument("--json", action="store_true", help="root, key and seconds as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Tune, or find the cache in the store; print the cache root."""
    from pipeline import log
    from pipeline.image.flow import fill_store

    tuned = fill_store(request_from(arguments))
    manifest = tuned.keys[0].manifest
    if arguments.json:
        told = {"root": str(tuned.root), "key": manifest.key, "seconds": tuned.seconds, "reused": tuned.reused}
        json.dump({**told, "entries": manifest.entries_per_op()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print(tuned.root)
    took = "found in the store: not tuned again" if tuned.reused else f"tuned in {tuned.seconds:.1f} s"
    log.note(f"{manifest.key}: {took}")
    return 0
