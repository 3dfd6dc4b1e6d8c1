"""`pipeline daemon up|status|down|remove`: find, start, stop, describe or remove a Docker Engine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.contract.errors import Exit
from pipeline.contract.text import without_login

if TYPE_CHECKING:
    from pipeline.daemon import Status


def configure_up(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `daemon up`."""
    parser.add_argument(
        "--store",
        choices=("classic", "containerd"),
        help="image store (default: as at the last start, at first classic)",
    )


def execute_up(arguments: argparse.Namespace) -> int:
    """Print the address of the Docker Engine that answers now."""
    from pipeline import daemon

    print(f"DOCKER_HOST={daemon.up(arguments.store).host}")
    return int(Exit.OK)


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `daemon status`."""
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute_status(arguments: argparse.Namespace) -> int:
    """Describe the Docker Engine that answers, and the private one; exit 4 when none answers."""
    from pipeline import daemon

    found = daemon.status()
    print(json.dumps(asdict(found), indent=2) if arguments.json else "\n".join(_lines(found)))
    return int(Exit.OK if found.engine else Exit.NO_DOCKER)


def configure_down(_parser: argparse.ArgumentParser) -> None:
    """`daemon down` has no arguments."""


def execute_down(_arguments: argparse.Namespace) -> int:
    """Stop the private Docker Engine, if it runs."""
    from pipeline import daemon, log

    log.note("private Docker Engine stopped" if daemon.down() else "no private Docker Engine was running")
    return int(Exit.OK)


def configure_remove(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `daemon remove`."""
    parser.add_argument("--data", action="store_true", help="delete its images and build cache too")


def execute_remove(arguments: argparse.Namespace) -> int:
    """Undo what `daemon up` installed."""
    from pipeline import daemon, log

    for line in daemon.remove(data=arguments.data) or ("there was nothing to remove",):
        log.note(line)
    return int(Exit.OK)


def _lines(found: Status) -> list[str]:
    engine = found.engine
    if engine is None:
        lines = [f"engine   none answers: {found.remedy}"]
    else:
        devices = ", ".join(engine.cdi_devices) or ("none known" if engine.cdi else "CDI is off")
        lines = [
            f"engine   {without_login(engine.host)} ({engine.source})",
            f"version  {engine.version}, API {engine.api_version}, {engine.os}/{engine.arch}",
            f"store    {engine.store} ({engine.storage_driver})" + (", rootless" if engine.rootless else ""),
            f"devices  {devices}; default runtime {engine.default_runtime}",
        ]
    lines += [
        f"private  {'running' if found.running else 'not running'}, {found.store} store",
        f"         data {found.root}",
        f"         log {found.log}",
    ]
    if found.packages:
        lines.append(f"packages {len(found.packages)} installed by this tool; `pipeline daemon remove` removes them")
    return lines
