"""`pipeline clean`: free what can be made again without timing anything; `pipeline cache rm` is for the store."""

from __future__ import annotations

import argparse
import contextlib

from pipeline.contract.commandline import whole


def _days(text: str) -> int:
    return 0 if text == "0" else whole(text, "days", 3650)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `clean`."""
    parser.add_argument(
        "--days", type=_days, default=7, metavar="N", help="remove what was not used for N days (default: 7; 0: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Clean the cache home, and the engine where one answers; print a line for each thing."""
    from pipeline import log
    from pipeline.daemon import find
    from pipeline.home import cache_home
    from pipeline.image.clean import clean
    from pipeline.image.session import open_session

    with contextlib.ExitStack() as stack:
        session = stack.enter_context(open_session("clean", leftovers=False)) if find() is not None else None
        gone = clean(session, cache_home(), days=float(arguments.days), dry_run=arguments.dry_run)
    for item in gone:
        print(item.line())
    freed = sum(item.size for item in gone)
    log.note(f"{len(gone)} items, {freed / 1e6:.0f} MB {'would be removed' if arguments.dry_run else 'removed'}")
    return 0
