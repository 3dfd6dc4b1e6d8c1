"""`pipeline verify IMAGE`: a verdict on a finished image."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from pipeline.contract.bounds import seconds
from pipeline.contract.commandline import path

_REMEDY = "`pipeline build MODEL --retune` makes the caches and the image again"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument("image", metavar="IMAGE", help="name or id of an image in the engine")
    parser.add_argument("--level", choices=("static", "replay"), default="replay", help="look only, or run every op")
    parser.add_argument("--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of start and replay")
    parser.add_argument("--deep", action="store_true", help="list the last layer's files (reads the whole image)")
    parser.add_argument("-o", "--output", type=path, metavar="FILE", help="write the verdict to FILE")
    parser.add_argument("--json", action="store_true", help="the verdict on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Verify one image; exit 7 naming what missed."""
    from pipeline import log
    from pipeline.contract.errors import UsageError
    from pipeline.contract.files import write_json
    from pipeline.daemon import ensure
    from pipeline.daemon.look import Look
    from pipeline.image.device import read_processor
    from pipeline.image.facts import probe
    from pipeline.image.flow import how_to_verify
    from pipeline.image.gpus import offered
    from pipeline.image.guard import connected
    from pipeline.image.settings import check_reference
    from pipeline.image.verify import VerifyFailed, check_present, verify

    if not arguments.image:
        raise UsageError("no image was named", hint="make verify IMAGE=tuned/tiny:…, or `docker images tuned/*`")
    check_reference(arguments.image)
    engine = ensure()
    with connected(engine) as client:
        check_present(client, arguments.image)
        offer = offered(engine)
        _, gpus = probe(client, arguments.image, offer) if offer.access != "none" else (None, offer)
        processor = read_processor(client, arguments.image, local=engine.local)
        how = how_to_verify(engine, gpus, processor, float(arguments.startup_max_wait))
        look = Look.EXPORTED if arguments.deep else how.look
        verdict = verify(client, arguments.image, replace(how, level=arguments.level, look=look))
    if arguments.output is not None:
        write_json(arguments.output, verdict.to_json())
    if arguments.json:
        json.dump(verdict.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    if verdict.result != "pass":
        raise VerifyFailed(verdict, _REMEDY)
    counts = ", ".join(f"{number} {name}" for name, number in verdict.checks.items())
    log.note(f"{arguments.image}: {verdict.level} pass ({counts})")
    return 0
