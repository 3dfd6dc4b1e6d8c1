"""Docker Engines: found, started or refused. Thin over the docker SDK and the buildx CLI.

`ensure()` gives an `Engine` that answers; `connect(engine)` the docker SDK's client for it;
`buildx.environment(engine)` what `docker buildx` needs to use it. Everything here raises an `EngineError`, which
ends with exit code 4.
"""

from __future__ import annotations

from .client import connect
from .facts import Engine, Tls
from .finding import find
from .flow import down, ensure, status, up

__all__ = ["Engine", "Tls", "connect", "down", "ensure", "find", "status", "up"]
