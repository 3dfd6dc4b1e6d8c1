"""`pipeline report IMAGE`: the page of an image, from what the image holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.commandline import path
from pipeline.contract.errors import UsageError

if TYPE_CHECKING:
    from pipeline.image.road import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("image", metavar="IMAGE", help="name or id of an image in the Docker Engine")
    parser.add_argument(
        "-o", "--output", type=path, default=Path("report.html"), metavar="FILE", help="default: report.html"
    )
    parser.add_argument("--verdict", type=path, metavar="FILE", help="a verdict.json from where the image was verified")


def execute(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from pipeline import log
    from pipeline.contract.files import write_whole
    from pipeline.contract.verdict import Verdict
    from pipeline.home import cache_home
    from pipeline.report.facts import gather
    from pipeline.report.page import page

    from .locations import image_in_engine, locate

    kind = locate(arguments.image).kind
    if kind != "image":
        raise UsageError(
            f"{arguments.image} is a {kind}, not an image in the Docker Engine", hint="`docker images` lists them"
        )
    verdict = None if arguments.verdict is None else Verdict.load(arguments.verdict.read_bytes())
    with image_in_engine(arguments.image) as (client, _):
        facts = gather(client, arguments.image, cache_home(), verdict)
    write_whole(arguments.output, page(facts).encode())
    log.note(f"wrote {arguments.output}")
    return 0


def summarize(outcome: Outcome) -> None:
    """Show the summary of an image that was built a moment ago, and write its page where there is none yet."""
    from pipeline import log
    from pipeline.contract.files import write_whole
    from pipeline.home import cache_home
    from pipeline.image.names import plain
    from pipeline.report.facts import gather, keep, kept, of_outcome
    from pipeline.report.terminal import show

    from .locations import image_in_engine

    home, verdict = cache_home(), outcome.finished.verdict
    target = home / "reports" / f"{plain(outcome.image, 120)}.html"
    if kept(home, verdict.identity)[0] != verdict or not _is_of(target, verdict.identity):
        from pipeline.report.page import page

        keep(home, verdict, dict(outcome.steps))
        try:
            with image_in_engine(outcome.image) as (client, _):
                write_whole(target, page(gather(client, outcome.image, home)).encode())
        except OSError as error:
            log.warn(f"{target} was not written: {error.strerror}; `pipeline report {outcome.image}` writes the page")
    show(outcome, of_outcome(outcome), str(target) if target.is_file() else "")


def _is_of(page: Path, identity: str) -> bool:
    """Whether a page is of the image with this identity."""
    try:
        return identity in page.read_text(encoding="utf-8")
    except OSError:
        return False
