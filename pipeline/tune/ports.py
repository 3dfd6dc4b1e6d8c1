"""A port for a process that will open it seconds later. Standard library only."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FROM, _TO = 10_000, 30_000  # above what services are used to, below the ports that Kubernetes passes on (30000-32767)
_TRIES = 100


def free_port() -> int:
    """A port that is free now and that the kernel gives to nobody who asks for any, so that it stays free until then.

    Where the kernel gives out all of them, it is one of those.
    """
    ports = range(_FROM, min(_TO, _first_given_out()))
    for _ in range(_TRIES if len(ports) > _TRIES else 0):
        with contextlib.suppress(OSError):
            return _bound(ports[secrets.randbelow(len(ports))])
    return _bound(0)


def _first_given_out() -> int:
    """The lowest port that the kernel chooses itself (`ip_local_port_range`, ip-sysctl)."""
    try:
        return int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # its default


def _bound(port: int) -> int:
    """The port that a socket gets on the loopback which asks for this one; raise `OSError` where it is taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])
