"""`pipeline engine`: find, start, stop or describe a Docker Engine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.daemon.state import Status


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `engine`."""
    actions = parser.add_subparsers(dest="action", metavar="up|down|status", required=True)
    up = actions.add_parser(
        "up", help="use the engine that answers, else install and start a private one (root, Debian)"
    )
    up.add_argument(
        "--store",
        choices=("classic", "containerd"),
        help="image store (default: as at the last start, at first classic)",
    )
    actions.add_parser("down", help="stop the private engine; what it holds stays")
    status = actions.add_parser("status", help="say which engine answers; exit 4 when none does")
    status.add_argument("--json", action="store_true", help="as JSON on stdout")
    status.add_argument("--size", action="store_true", help="count the private engine's data to the end")


def execute(arguments: argparse.Namespace) -> int:
    """Do one of the three."""
    from pipeline import daemon as room
    from pipeline import log

    if arguments.action == "up":
        print(f"DOCKER_HOST={room.up(arguments.store).host}")
        return int(Exit.OK)
    if arguments.action == "down":
        log.note("private engine stopped" if room.down() else "no private engine was running")
        return int(Exit.OK)
    found = room.status(budget=3600.0) if arguments.size else room.status()
    if arguments.json:
        import json

        print(json.dumps(asdict(found), indent=2))
    else:
        print("\n".join(_lines(found)))
    return int(Exit.OK if found.engine else Exit.NO_DOCKER)


def _amount(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _lines(found: Status) -> list[str]:
    engine, own = found.engine, found.private
    lines = []
    if engine is None:
        lines.append("engine   none answers (`pipeline engine up` starts one)")
    else:
        devices = ", ".join(engine.cdi_devices) or ("none known" if engine.cdi else "CDI is off")
        lines += [
            f"engine   {engine.host} ({engine.source})",
            f"version  {engine.version}, API {engine.api_version}, {engine.os}/{engine.arch}",
            f"store    {engine.store} ({engine.storage_driver})" + (", rootless" if engine.rootless else ""),
            f"devices  {devices}; default runtime {engine.default_runtime}",
        ]
    size = _amount(own.bytes) if own.complete else f"more than {_amount(own.bytes)} (--size counts to the end)"
    lines += [
        f"private  {'running, process ' + str(own.pid) if own.pid else 'not running'}, {own.store} store, {size}",
        f"         data {own.root}",
        f"         log {own.log}",
    ]
    return lines
