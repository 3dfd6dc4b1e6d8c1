"""Making sure that there is an engine: use the one that answers, else start our own; stop it; say how it is."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline import log

from . import buildx, osrelease, packages, private, remedies
from .errors import BuildxMissing, NoEngine, StoreDiffers
from .facts import Engine
from .finding import at_address, find
from .lock import locked
from .places import Places, places

_SYS_ADMIN = 21  # bit of CAP_SYS_ADMIN in CapEff (capabilities(7))


def ensure(store: str | None = None) -> Engine:
    """Return an engine that answers and has buildx beside it, starting a private one where there is none.

    `store` (`classic` or `containerd`) is that of an engine that must be started; None means as it was the last
    time, at first classic. An engine that answers is used with the store that it has. Raises an `EngineError`.
    """
    engine = _answering(store)
    version = _buildx(engine)
    log.note(
        f"engine: Docker {engine.version} at {engine.host} ({engine.source}), {engine.store} store, "
        f"buildx {'.'.join(str(n) for n in version)}"
    )
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


def _answering(store: str | None) -> Engine:
    engine = find()
    if engine is not None:
        return engine
    at = places()
    _refuse_where_impossible()
    with locked(at.lock):
        engine = find()  # another process may have started one while we waited
        if engine is not None:
            return engine
        _install_missing(at)
        private.start(at, store or private.store(at))
    return at_address(at.host, "private")


def _refuse_where_impossible() -> None:
    system = osrelease.here()
    root = os.geteuid() == 0
    if root and packages.supported(system) and _may_mount():
        return
    why = (
        f"{system.name} is not a system on which this tool starts one" if root and _may_mount()
        else "this process may not mount, as in a container without privileges" if root
        else "only root can start one"
    )  # fmt: skip
    raise NoEngine(
        f"no Docker Engine answers, and {why}",
        hint=remedies.hint(system, installed=packages.program("dockerd") is not None, root=root),
    )


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN; root in an unprivileged container has not."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_ADMIN & 1)
    return False


def _install_missing(at: Places) -> None:
    system = osrelease.here()
    if packages.missing(system):
        packages.install(system, packages.names(system), at.apt_log)


def _buildx(engine: Engine) -> buildx.Version:
    """buildx's version; as root on a known system it is installed beside an engine that lacks it."""
    try:
        return buildx.version()
    except BuildxMissing as error:
        system = osrelease.here()
        if os.geteuid() != 0 or not packages.supported(system):
            raise
        log.note(f"{engine.host} answers, but {error.message}")
        at = places()
        with locked(at.lock):
            wanted = packages.client_names(system)
            packages.install(system, wanted, at.apt_log)
        return buildx.version()


def down() -> bool:
    """Stop the private engine; return whether one was running. Other engines are left alone."""
    at = places()
    if not at.root.exists() and not at.run.exists():
        return False
    if os.geteuid() != 0:
        raise NoEngine("only root can stop the private engine", hint="sudo make engine-down")
    with locked(at.lock):
        return private.stop(at)


@dataclass(frozen=True)
class PrivateState:
    """Our own engine: where it lies, whether it runs, how much it holds (bytes; at least, when not `complete`)."""

    host: str
    root: str
    log: str
    store: str
    pid: int | None
    bytes: int
    complete: bool


@dataclass(frozen=True)
class Status:
    """The engine that would be used, None when none answers, and the state of our own."""

    engine: Engine | None
    private: PrivateState


def status(*, budget: float = 0.02) -> Status:
    """Look without changing anything; the private engine's size is counted for at most `budget` seconds."""
    at = places()
    size, complete = _size(at.root, budget)
    own = PrivateState(
        host=at.host,
        root=str(at.root),
        log=str(at.log),
        store=private.store(at),
        pid=private.running_pid(at),
        bytes=size,
        complete=complete,
    )
    return Status(find(), own)


def _size(root: Path, budget: float) -> tuple[int, bool]:
    """Bytes on disk below `root`, without what is mounted there; False when the time was up."""
    deadline = time.monotonic() + budget
    total = 0
    try:
        device = root.stat().st_dev
    except OSError:
        return 0, True
    folders = [str(root)]
    while folders:
        if time.monotonic() > deadline:
            return total, False
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    state = entry.stat(follow_symlinks=False)
                    if state.st_dev != device:
                        continue
                    total += state.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # a folder that went away, or that is not ours to read
            continue
    return total, True
