"""Make sure that there is an engine: use the one that answers, else start a private one; stop and remove that again."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import DockerError
from pipeline.contract.text import without_login
from pipeline.run import ProcessFailed, ProgramMissing, run

from . import debian, private
from .client import OLDEST, Engine, NoEngine, find
from .lock import locked

_SYS_ADMIN = 21  # bit of CAP_SYS_ADMIN in CapEff (capabilities(7))
_LOCK = "the private engine"
OLDEST_BUILDX = (0, 10, 0)  # the first with `--provenance`


class BuildxMissing(DockerError):
    """The docker CLI or its buildx plugin is missing or too old."""


@dataclass(frozen=True)
class Status:
    """The engine that would be used, None when none answers, and the state of the private engine.

    `remedy` says what to do when none answers; `packages` are those that `remove` would remove.
    """

    engine: Engine | None
    remedy: str
    running: bool
    store: str
    root: str
    log: str
    packages: tuple[str, ...]


def ensure(store: str | None = None) -> Engine:
    """Return an engine that answers and has buildx beside it, starting a private one where there is none.

    `store` (`classic` or `containerd`) is that of an engine that must be started; None means as at its last start, at
    first classic. An engine that answers is used with the store that it has. Raises `DockerError`.
    """
    builder = os.environ.get("BUILDX_BUILDER", "")
    if builder not in ("", "default"):  # those of other drivers have neither the engine's images nor its GPUs
        log.note(f"BUILDX_BUILDER={builder} is not used: images are built by the Docker Engine that runs them")
    engine = find() or _start(store)
    version = _buildx(engine)
    log.note(
        f"Docker Engine {engine.version} at {without_login(engine.host)} ({engine.source}), {engine.store} store, "
        f"buildx {'.'.join(map(str, version))}"
    )
    if engine.rootless:
        log.note(
            "this Docker Engine is rootless: its GPUs need `no-cgroups = true` in NVIDIA's container runtime, or CDI"
        )
    return engine


def up(store: str | None = None) -> Engine:
    """Like `ensure`, but an engine with another store than the one asked for is a `DockerError`."""
    engine = ensure(store)
    if store is not None and engine.store != store:
        again = f"`pipeline daemon down && pipeline daemon up --store {store}`"
        wanted = str(store == "containerd").lower()
        change = (
            again
            if engine.host == private.folders().host
            else f'set "containerd-snapshotter": {wanted} in its features'
        )
        raise DockerError(
            f"the Docker Engine at {engine.host} ({engine.source}) uses the {engine.store} image store",
            hint=f"{change}; each store has its own images: those of the {engine.store} store are not seen then",
        )
    return engine


def down() -> bool:
    """Stop the private engine; return whether one was running. Other engines are left alone."""
    at = private.folders()
    if not at.root.exists() and not at.run.exists():
        return False
    _require_root("stop the private Docker Engine")
    with locked(at.lock, _LOCK):
        return private.stop(at)


def remove(*, data: bool = False) -> tuple[str, ...]:
    """Stop the private engine and undo its installation; with `data` delete its images too. Return what was removed."""
    at = private.folders()
    _require_root("remove what was installed")
    done = []
    with locked(at.lock, _LOCK):
        if private.stop(at):
            done.append("the private Docker Engine was stopped")
        packages = debian.remove(at.root / "apt.log")
        if packages:
            done.append(f"removed the packages {', '.join(packages)}")
        if data:
            shutil.rmtree(at.root)
            done.append(f"deleted {at.root}")
        elif (at.root / "data").exists():
            done.append(f"its images stay in {at.root}; with --data they are deleted too")
    return tuple(done)


def status() -> Status:
    """Look without changing anything."""
    at = private.folders()
    engine = find()
    return Status(
        engine=engine,
        remedy="" if engine else "`pipeline daemon up` starts one" if not _why_not() else remedy(),
        running=private.running(at),
        store=private.store(at),
        root=str(at.root),
        log=str(at.log),
        packages=debian.recorded(),
    )


def _start(store: str | None) -> Engine:
    """Start the private engine, or return the one that another process started meanwhile."""
    at = private.folders()
    why = _why_not()
    if why:
        raise NoEngine(f"no Docker Engine answers, and {why}", hint=remedy())
    with locked(at.lock, _LOCK):
        engine = find()  # another process may have started one while we waited
        if engine is None:
            debian.install_engine(at.root / "apt.log", OLDEST)
            private.start(at, store or private.store(at))
            engine = find()
    if engine is None:
        raise DockerError("the private Docker Engine was started and does not answer", log=str(at.log))
    return engine


def _buildx(engine: Engine) -> tuple[int, ...]:
    try:
        return buildx_version()
    except BuildxMissing as error:
        if os.geteuid() != 0 or not debian.supported():
            raise
        log.note(f"{engine.host} answers, but {error.message}")
        debian.install_buildx(private.folders().root / "apt.log")
        return buildx_version()


def buildx_version() -> tuple[int, ...]:
    """What `docker buildx version` says: `github.com/docker/buildx v0.29.1 …` or Debian's `0.13.1+ds1 …`.

    Raises `BuildxMissing` where there is none, or it is too old.
    """
    hint = (
        "install docker-buildx (Debian 13, Ubuntu) or docker-buildx-plugin (Docker's own packages); as root on Debian "
        "`pipeline daemon up` does it"
    )
    try:
        said = run(["docker", "buildx", "version"], capture=True, timeout=60).stdout
    except ProgramMissing as error:
        raise BuildxMissing("the docker command, which runs buildx, is not on PATH", hint=hint) from error
    except ProcessFailed as error:
        raise BuildxMissing("the docker command has no buildx plugin", hint=hint, details=error.details[:3]) from error
    number = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", said)
    found = tuple(map(int, number.groups())) if number else ()
    if found < OLDEST_BUILDX:
        have = ".".join(map(str, found)) or "of unknown version"
        raise BuildxMissing(f"buildx is {have}; {'.'.join(map(str, OLDEST_BUILDX))} or newer is needed", hint=hint)
    return found


def _require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise DockerError(f"only root can {what}", hint="run the same command as root")


def _why_not() -> str:
    """Why no private engine can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "only root can start one"
    if not _may_mount():
        return "this process may not mount, as in a container without privileges"
    return "" if debian.supported() else "one can only be installed on Debian 12 or newer, or Ubuntu"


def remedy() -> str:
    """What a user who cannot start a private engine can do, as one line."""
    if debian.program("dockerd") is not None and os.geteuid() != 0:
        return (
            "start the engine that is installed for you alone: `dockerd-rootless-setuptool.sh install`; or have an "
            "administrator start it (`systemctl start docker`) and add you to the group docker; or set DOCKER_HOST"
        )
    return (
        f"have an administrator install Docker Engine {OLDEST} or newer with buildx and add you to the group docker, "
        "or set DOCKER_HOST to an engine that you may use, such as ssh://user@host"
    )


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN; root in an unprivileged container has not."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_ADMIN & 1)
    return False
