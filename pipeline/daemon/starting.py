"""What happens where no engine answers: decide whether one may be started here, install, start; and stop it again.

Imported only then: a run that finds its engine pays for none of this.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import osrelease, packages, private, remedies
from .errors import BuildxMissing, NoEngine
from .facts import Engine
from .finding import at_address, find
from .lock import locked
from .places import Places, places
from .state import store

_SYS_ADMIN = 21  # bit of CAP_SYS_ADMIN in CapEff (capabilities(7))


def start(image_store: str | None) -> Engine:
    """Start the private engine, or return the one that another process started meanwhile; raise an `DockerError`."""
    at = places()
    _refuse_where_impossible()
    with locked(at.lock):
        engine = find()  # another process may have started one while we waited
        if engine is not None:
            return engine
        _install_missing(at)
        private.start(at, image_store or store(at))
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


def install_buildx(error: BuildxMissing) -> None:
    """Install buildx beside an engine that answers: as root on a known system, else raise `error` again."""
    system = osrelease.here()
    if os.geteuid() != 0 or not packages.supported(system) or packages.program("apt-get") is None:
        raise error
    at = places()
    with locked(at.lock):
        packages.install(system, packages.client_names(system), at.apt_log)


def stop() -> bool:
    """Stop the private engine; return whether one was running. Other engines are left alone."""
    at = places()
    if not at.root.exists() and not at.run.exists():
        return False
    if os.geteuid() != 0:
        raise NoEngine("only root can stop the private engine", hint="run `pipeline engine down` as root")
    with locked(at.lock):
        return private.stop(at)
