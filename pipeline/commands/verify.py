"""`pipeline verify IMAGE`: a verdict on a finished image."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.commandline import path, seconds

if TYPE_CHECKING:
    from pipeline.contract.verdict import Verdict

_REMEDY = "`pipeline build MODEL --retune` makes the caches and the image again"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument(
        "image", metavar="IMAGE", help="name or id of an image in the Docker Engine; with --in-place a verdict"
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="start the server of the image in which this runs",
    )
    parser.add_argument(
        "--level", choices=("static", "replay"), default="replay", help="static: files only; replay: also every op"
    )
    parser.add_argument(
        "--startup-max-wait", type=seconds, default=1200, metavar="S", help="timeout of each start, in s"
    )
    parser.add_argument("-o", "--output", type=path, metavar="FILE", help="write the verdict to FILE")
    parser.add_argument("--json", action="store_true", help="the verdict on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Verify one image; exit 7 naming what missed."""
    from pipeline import log
    from pipeline.contract.errors import UsageError
    from pipeline.contract.files import write_json
    from pipeline.contract.verdict import VerifyFailed

    if not arguments.image:
        raise UsageError("no image was named", hint="make verify IMAGE=tuned/tiny:…, or `docker images tuned/*`")
    verdict = (_in_place if arguments.in_place else _in_engine)(arguments)
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


def _in_engine(arguments: argparse.Namespace) -> Verdict:
    from pipeline.image.names import check_reference
    from pipeline.image.session import open_session
    from pipeline.image.verify import verify_image
    from pipeline.report.facts import keep, kept

    check_reference(arguments.image)
    with open_session("verify") as session:
        verdict = verify_image(
            session, arguments.image, level=arguments.level, timeout=float(arguments.startup_max_wait)
        )
        before, steps = kept(session.home, verdict.identity)
        if before is None or verdict.level == "replay" or verdict.result == "fail":  # what says more stays
            keep(session.home, verdict, steps)
    return verdict


def _in_place(arguments: argparse.Namespace) -> Verdict:
    from pipeline.contract.errors import UsageError
    from pipeline.contract.verdict import Verdict
    from pipeline.servers.in_place import prove_in_place

    try:
        about = Verdict.load(Path(arguments.image).read_bytes())
    except OSError as error:
        raise UsageError(
            f"{arguments.image}: {error.strerror}",
            hint="the verdict of the host that baked: `pipeline verify IMAGE -o`",
        ) from error
    return prove_in_place(about, ready=float(arguments.startup_max_wait))
