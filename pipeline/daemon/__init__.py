"""Find, start and remove a Docker Engine. Thin over the docker SDK and the docker CLI.

`ensure()` returns an `Engine` that answers, `connect(engine)` the docker SDK's client for it, and
`engine.environment()` what `docker buildx` needs to use it. `device_lock` keeps two runs from timing one device
at the same time. Errors are `DockerError`s, exit code 4.
"""

from __future__ import annotations

from .client import Engine, NoEngine, at_address, connect, engine_from, find
from .lock import device_lock, locked
from .manage import Status, down, ensure, remove, status, up

__all__ = [
    "Engine",
    "NoEngine",
    "Status",
    "at_address",
    "connect",
    "device_lock",
    "down",
    "engine_from",
    "ensure",
    "find",
    "locked",
    "remove",
    "status",
    "up",
]
