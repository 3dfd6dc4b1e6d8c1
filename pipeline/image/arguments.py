"""The arguments that `image` and `tune` share, and the request that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import log
from pipeline.contract.plan import Plan
from pipeline.planning.arguments import add_arguments, plan_from

from .request import Request
from .settings import check_image_name, check_previous

ROOT = Path(__file__).resolve().parent.parent.parent


def seconds(text: str) -> int:
    """An argument that counts seconds: a whole number from 1 to a day."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return int(text)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the planning options, and what decides how the ranks tune."""
    add_arguments(parser)
    parser.add_argument("--base-image", default="", metavar="REF", help="build on this image, not on the pinned base")
    parser.add_argument("--retune", action="store_true", help="tune again although the store has this very cache")
    parser.add_argument("--previous", type=Path, metavar="DIR", help="let the ranks start from this cache root")
    parser.add_argument("--timeout", type=seconds, default=300, metavar="S", help="bound of a collective between ranks")
    parser.add_argument("--store", choices=("classic", "containerd"), default="classic", help="of an engine we start")


def _announce(plan: Plan) -> None:
    pairs = sum(len(op.buckets) for op in plan.ops)
    log.note(
        f"{plan.model}: {len(plan.ops)} ops, {pairs} op × bucket pairs, {plan.layout.world} ranks, "
        f"device {plan.device}, FlashInfer {plan.flashinfer_version}, plan {plan.digest[:12]}"
    )
    for left in plan.untuned:
        log.note(f"not tuned: {left.name}: {left.reason}")
    for remark in plan.notes:
        log.note(remark)


def request_from(arguments: argparse.Namespace) -> Request:
    """Check every setting, make the plan and say what will be tuned; nothing was started before this returns."""
    image = getattr(arguments, "image", "")
    check_image_name(image)
    previous = check_previous(arguments.previous)
    plan = plan_from(arguments, ROOT)
    _announce(plan)
    return Request(
        root=ROOT,
        plan=plan,
        base_image=arguments.base_image,
        image=image,
        retune=arguments.retune,
        previous=previous,
        timeout=arguments.timeout,
        max_wait=float(getattr(arguments, "startup_max_wait", 1200)),
        store=arguments.store,
    )
