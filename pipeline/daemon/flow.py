"""Making sure that there is an engine: use the one that answers, else start our own; or stop it."""

from __future__ import annotations

import os

from pipeline import log

from . import buildx
from .builders import check_builder
from .errors import BuildxMissing, StoreDiffers
from .facts import Engine
from .finding import find
from .places import places


def ensure(store: str | None = None) -> Engine:
    """Return an engine that answers and has buildx beside it, starting a private one where there is none.

    `store` (`classic` or `containerd`) is that of an engine that must be started; None means as it was the last
    time, at first classic. An engine that answers is used with the store that it has. Raises an `DockerError`.
    """
    check_builder(os.environ)
    engine = find() or _start(store)
    version = _buildx(engine)
    log.note(
        f"engine: Docker {engine.version} at {engine.host} ({engine.source}), {engine.store} store, "
        f"buildx {'.'.join(str(n) for n in version)}"
    )
    if engine.rootless:
        log.note("this engine is rootless: its GPUs need `no-cgroups = true` in NVIDIA's container runtime, or CDI")
    return engine


def up(store: str | None = None) -> Engine:
    """Like `ensure`, but an engine with another store than the one asked for is refused (`StoreDiffers`)."""
    engine = ensure(store)
    if store is not None and engine.store != store:
        again = f"pipeline engine down && pipeline engine up --store {store}"
        wanted = str(store == "containerd").lower()
        raise StoreDiffers(
            f"the engine at {engine.host} ({engine.source}) runs with the {engine.store} store",
            hint=again if engine.host == places().host else f'set "containerd-snapshotter": {wanted} in its features',
        )
    return engine


def _start(store: str | None) -> Engine:
    from .starting import start

    return start(store)


def _buildx(engine: Engine) -> buildx.Version:
    try:
        return buildx.version()
    except BuildxMissing as error:
        from .starting import install_buildx

        log.note(f"{engine.host} answers, but {error.message}")
        install_buildx(error)
        return buildx.version()


def down() -> bool:
    """Stop the private engine; return whether one was running. Other engines are left alone."""
    from .starting import stop

    return stop()
