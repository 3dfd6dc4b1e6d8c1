"""What the tuner is given: its arguments, plan.json, and a Python with torch. Standard library only."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from pipeline.contract.commandline import Parser, budget, path, seconds
from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan

from .strategies import STRATEGIES


class PlanUnreadable(UsageError):
    """plan.json cannot be read."""


class TorchMissing(UsageError):
    """This Python has no torch."""


def read_plan(path: Path) -> Plan:
    """Read a plan; raise `PlanUnreadable` or `PlanInvalid`."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanUnreadable(f"{path} cannot be read: {error.strerror}", hint="make it with `pipeline plan`") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep
        raise PlanUnreadable(f"{path} is not JSON: {error}", hint="make it with `pipeline plan`") from error
    return Plan.from_json(value)


def need_torch() -> None:
    """Raise `TorchMissing` where this Python has no torch."""
    if importlib.util.find_spec("torch") is None:
        raise TorchMissing(
            f"{sys.executable} has no torch",
            hint="this runs where torch and FlashInfer are, as in the image; on a host type `pipeline tune MODEL`",
        )


def parser() -> Parser:
    """The parser of `python -m pipeline.tune`."""
    found = Parser(prog="python -m pipeline.tune", description="Tune a plan on all ranks.", allow_abbrev=False)
    found.add_argument("plan", type=path, help="plan.json")
    found.add_argument("out", type=path, metavar="OUT", help="directory to write <version>/<arch>/<hash>/ below")
    found.add_argument("--previous", type=path, metavar="DIR", help="begin with a sound cache below DIR")
    found.add_argument("--timeout", type=seconds, default=300, metavar="S", help="timeout of the process group")
    found.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="",
        help="how the ranks share the work (default: the best that this FlashInfer allows)",
    )
    found.add_argument(
        "--state",
        type=path,
        metavar="DIR",
        help="keep each finished op in DIR, and resume from what an interrupted run left there",
    )
    found.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes that tune together")
    found.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is, from 0")
    found.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the nodes meet: a port of node 0"
    )
    found.add_argument("--keep-failure", action="store_true", help="write failures to OUT/failure.json and end with 0")
    found.add_argument(
        "--compare",
        choices=("on", "off"),
        default="on",
        help="time the fastest tactics beside the default before choosing; off: FlashInfer's argmin",
    )
    found.add_argument(
        "--compare-budget",
        type=budget,
        metavar="S",
        help="limit of all comparing: seconds times ops times buckets (default: 1)",
    )
    found.add_argument(
        "--second-process",
        choices=("on", "off"),
        help="on: a second process of each rank times entries as well (default: on a GPU)",
    )
    return found
