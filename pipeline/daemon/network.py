"""The private engine's bridge: its own, because docker0 may belong to another engine on the same machine.

(dockerd with `bridge: none` deletes docker0, and two engines on one bridge hand out the same addresses.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.run import ProcessFailed, run

from . import packages
from .procs import all_pids, command_line


@dataclass(frozen=True)
class Network:
    """How containers and build steps of the engine get a network."""

    bridge: str  # name of the bridge, empty for none
    nat: bool  # whether iptables lets them out

    def __str__(self) -> str:
        return (
            "no network" if not self.bridge else f"bridge {self.bridge}, {'with' if self.nat else 'without'} iptables"
        )

    def settings(self) -> dict[str, Any]:
        """dockerd's settings for this."""
        return {"bridge": self.bridge or "none", "iptables": self.nat, "ip6tables": False}


NO_NETWORK = Network("", nat=False)


def _tries(command: list[str]) -> bool:
    path = packages.program(command[0])
    if path is None:
        return False
    try:
        run([path, *command[1:]], capture=True, timeout=30)
    except ProcessFailed:
        return False
    return True


def _another_engine() -> bool:
    """Whether another dockerd runs here: a second one that uses iptables would empty its chains on start."""
    lines = (command_line(pid) for pid in all_pids())
    return any(words and Path(words[0]).name == "dockerd" for words in lines)


def prepare(bridge: str) -> Network:
    """Make the bridge and say what it can do; with less than the usual, warn."""
    if not (Path("/sys/class/net") / bridge).exists() and not _tries(["ip", "link", "add", bridge, "type", "bridge"]):
        log.warn("this host makes no network bridge: build steps and containers have no network")
        return NO_NETWORK
    if _another_engine():
        log.note("another dockerd runs here: containers of the private engine reach this host only")
        return Network(bridge, nat=False)
    if not _tries(["iptables", "--wait", "--table", "nat", "--list-rules"]):
        log.warn("iptables does not work here: containers of the private engine reach this host only")
        return Network(bridge, nat=False)
    return Network(bridge, nat=True)


def weaker(net: Network) -> tuple[Network, ...]:
    """A network and what to fall back to, best first; none at all only where no other engine's docker0 would suffer."""
    steps = [net]
    if net.nat:
        steps.append(Network(net.bridge, nat=False))
    if net.bridge and not _another_engine():
        steps.append(NO_NETWORK)
    return tuple(steps)


def is_to_blame(lines: Sequence[str]) -> bool:
    """Whether dockerd's last words are about its network (moby says so in one of these words)."""
    return any(re.search(r"network controller|iptables|nf_tables|bridge", line, re.IGNORECASE) for line in lines)


def remove(bridge: str) -> None:
    """Take the bridge away, if it is there."""
    if (Path("/sys/class/net") / bridge).exists():
        _tries(["ip", "link", "delete", bridge])
