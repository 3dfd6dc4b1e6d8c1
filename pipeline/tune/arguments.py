"""The arguments of `python -m pipeline.tune`."""

from __future__ import annotations

from pipeline.contract.commandline import Parser, budget, path, seconds, whole
from pipeline.contract.plan import MOST_RANKS

from .strategy import STRATEGIES


def ranks(text: str) -> int:
    """A number of ranks."""
    return whole(text, "ranks", MOST_RANKS)


def parser() -> Parser:
    """The parser of `python -m pipeline.tune`."""
    found = Parser(prog="python -m pipeline.tune", description="Tune a plan on all ranks in step.", allow_abbrev=False)
    found.add_argument("plan", type=path, help="plan.json")
    found.add_argument("out", type=path, metavar="OUT", help="directory to write <version>/<arch>/<hash>/ below")
    found.add_argument("--previous", type=path, metavar="DIR", help="take up a sound cache below DIR")
    found.add_argument("--timeout", type=seconds, default=300, metavar="S", help="bound of the process group, seconds")
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
        help="keep each finished op in DIR and take up what an interrupted run left there",
    )
    found.add_argument("--no-resume", dest="resume", action="store_false", help="take up nothing from --state")
    found.add_argument("--nproc", type=ranks, metavar="N", help="number of ranks (default: as planned)")
    found.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of nodes that tune together")
    found.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is, from 0")
    found.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the nodes meet: a port of node 0"
    )
    found.add_argument("--stage", action="store_true", help="write failures to OUT/failure.json and end with 0")
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
        help="bound of all comparing: seconds times ops times buckets (default: 1)",
    )
    found.add_argument(
        "--workers",
        type=int,
        choices=(0, 1),
        help="1: a second process of each rank times entries as well (default: on a GPU)",
    )
    found.add_argument(
        "--share-gpu",
        action="store_true",
        help="let several ranks use one GPU: the contract between them is real, their timings are not",
    )
    return found
