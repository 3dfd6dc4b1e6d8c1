"""A port for a process that will open it seconds later."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that is free now, and below those that the kernel gives to whoever asks for any."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
