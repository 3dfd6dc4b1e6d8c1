"""Docker Engines: found, started or refused. Thin over the docker SDK and the buildx CLI.

`ensure()` gives an `Engine` that answers; `connect(engine)` the docker SDK's client for it;
`buildx.environment(engine)` what `docker buildx` needs to use it. Everything here raises an `DockerError`, which
ends with exit code 4. Names are loaded when they are first used: looking for an engine takes milliseconds only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import connect
    from .facts import Engine, Tls
    from .finding import find
    from .flow import down, ensure, up
    from .state import status

__all__ = ["Engine", "Tls", "connect", "down", "ensure", "find", "status", "up"]

_HOMES = {
    "connect": "client",
    "Engine": "facts",
    "Tls": "facts",
    "find": "finding",
    "down": "flow",
    "ensure": "flow",
    "up": "flow",
    "status": "state",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
