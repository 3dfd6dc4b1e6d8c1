"""`pipeline daemon`: find, start, stop, describe or remove a Docker Engine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.daemon import Status


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `daemon`."""
    actions = parser.add_subparsers(dest="action", metavar="up|status|down|remove", required=True)
    up = actions.add_parser(
        "up", help="use the engine that answers, else install and start a private one (root, Debian)"
    )
    up.add_argument(
        "--store",
        choices=("classic", "containerd"),
        help="image store (default: as at the last start, at first classic)",
    )
    status = actions.add_parser("status", help="say which engine answers; exit 4 when none does")
    status.add_argument("--json", action="store_true", help="as JSON on stdout")
    status.add_argument("--size", action="store_true", help="measure what the private engine takes on disk")
    actions.add_parser("down", help="stop the private engine; its images stay")
    remove = actions.add_parser(
        "remove", help="stop the private engine and remove what `up` installed: packages, apt source and pin"
    )
    remove.add_argument("--data", action="store_true", help="delete its images and build cache too")


def execute(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from pipeline import daemon, log

    if arguments.action == "up":
        print(f"DOCKER_HOST={daemon.up(arguments.store).host}")
    elif arguments.action == "down":
        log.note("private engine stopped" if daemon.down() else "no private engine was running")
    elif arguments.action == "remove":
        for line in daemon.remove(data=arguments.data) or ("there was nothing to remove",):
            log.note(line)
    else:
        found = daemon.status(count=arguments.size)
        if arguments.json:
            print(json.dumps(asdict(found), indent=2))
        else:
            print("\n".join(_lines(found)))
        return int(Exit.OK if found.engine else Exit.NO_DOCKER)
    return int(Exit.OK)


def _lines(found: Status) -> list[str]:
    engine = found.engine
    if engine is None:
        lines = [f"engine   none answers: {found.remedy}"]
    else:
        devices = ", ".join(engine.cdi_devices) or ("none known" if engine.cdi else "CDI is off")
        lines = [
            f"engine   {engine.host} ({engine.source})",
            f"version  {engine.version}, API {engine.api_version}, {engine.os}/{engine.arch}",
            f"store    {engine.store} ({engine.storage_driver})" + (", rootless" if engine.rootless else ""),
            f"devices  {devices}; default runtime {engine.default_runtime}",
        ]
    size = "" if found.bytes is None else f", {found.bytes / 1e9:.1f} GB"
    lines += [
        f"private  {'running' if found.running else 'not running'}, {found.store} store{size}",
        f"         data {found.root}",
        f"         log {found.log}",
    ]
    if found.packages:
        lines.append(f"packages {len(found.packages)} installed by this tool; `pipeline daemon remove` removes them")
    return lines
