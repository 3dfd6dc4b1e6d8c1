"""`pipeline image MODEL`: plan, tune inside the build, bake, verify, name."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pipeline.planning.arguments import add_arguments, plan_from

ROOT = Path(__file__).resolve().parent.parent.parent


def seconds(text: str) -> int:
    """An argument that counts seconds: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return int(text)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `image`."""
    add_arguments(parser)
    parser.add_argument("--image", default="", metavar="NAME", help="name of the image (default: from model, GPU, key)")
    parser.add_argument(
        "--base-image", default="", metavar="REF", help="build on this image instead of the pinned base"
    )
    parser.add_argument("--retune", action="store_true", help="tune again although the store has this very cache")
    parser.add_argument("--previous", type=Path, metavar="DIR", help="let the ranks start from this cache root")
    parser.add_argument("--timeout", type=seconds, default=300, metavar="S", help="bound of a collective between ranks")
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="bound of start and replay at verify"
    )
    parser.add_argument("--store", choices=("classic", "containerd"), default="classic", help="of an engine we start")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Build one image and show what came of it."""
    from pipeline import log
    from pipeline.image.flow import build_image
    from pipeline.image.request import Request
    from pipeline.image.settings import check_image_name, check_previous

    check_image_name(arguments.image)
    previous = check_previous(arguments.previous)
    plan = plan_from(arguments, ROOT)
    buckets = sum(len(op.buckets) for op in plan.ops)
    log.note(
        f"{plan.model}: {len(plan.ops)} ops, {buckets} op × bucket pairs, {plan.layout.world} ranks, "
        f"device {plan.device}, FlashInfer {plan.flashinfer_version}, plan {plan.digest[:12]}"
    )
    for left in plan.untuned:
        log.note(f"not tuned: {left.name}: {left.reason}")
    outcome = build_image(
        Request(
            root=ROOT,
            plan=plan,
            base_image=arguments.base_image,
            image=arguments.image,
            retune=arguments.retune,
            previous=previous,
            timeout=arguments.timeout,
            max_wait=float(arguments.startup_max_wait),
            store=arguments.store,
        )
    )
    if arguments.json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    from pipeline.image.report import show

    show(outcome)
    return 0
