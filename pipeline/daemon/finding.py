"""Finding an engine that answers, in the docker CLI's own order, then our private one."""

from __future__ import annotations

import contextlib
import grp
import os
import re
from collections.abc import Mapping
from pathlib import Path

from . import contexts, wire
from .errors import EngineSilent, EngineTooOld, NotDocker, SocketForbidden
from .facts import OLDEST, Answers, Engine, Tls, engine_from
from .places import places
from .procs import containerd_pid


def _group(path: Path) -> str:
    with contextlib.suppress(OSError, KeyError):
        return grp.getgrgid(path.stat().st_gid).gr_name
    return "docker"


def _forbidden(path: str, source: str) -> SocketForbidden:
    return SocketForbidden(
        f"this user may not open the Docker socket {path} ({source})",
        hint=f"sudo usermod -aG {_group(Path(path))} $USER and log in again, or run as root",
    )


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error) or type(error).__name__


def _silent(host: str, source: str, error: OSError) -> EngineSilent:
    undo = {"DOCKER_HOST": "unset DOCKER_HOST", "default socket": "look into its log"}.get(
        source, "`docker context use default`"
    )
    mend = "start that engine"
    if host.startswith("ssh://"):
        mend = f"`docker --host {host} version` must work without asking for anything"
    return EngineSilent(f"no Docker Engine answers at {host} ({source}): {_reason(error)}", hint=f"{mend}, or {undo}")


def _ask(host: str, source: str, tls: Tls | None) -> Answers:
    """What an engine says of itself; raises OSError when it does not answer."""
    address = wire.parse_address(host, source)
    if tls is None and address.scheme in {"unix", "tcp", "http"}:
        headers = wire.ping(address).headers
        info = wire.get_json(address, "/info", timeout=15.0)
        return Answers(info, headers.get("api-version", ""), podman="libpod" in headers.get("server", "").lower())
    if address.scheme == "ssh":
        from .ssh import reach

        reach(address.text)
    from .client import ask  # ssh and TLS are the docker SDK's

    return ask(address.text, tls)


def _checked(engine: Engine, *, podman: bool) -> Engine:
    if podman:
        raise NotDocker(
            f"{engine.host} ({engine.source}) is Podman, not a Docker Engine",
            hint="name a Docker Engine in DOCKER_HOST: named build contexts, layers that come out the same and the "
            "classic builder on GPUs are BuildKit's and Docker's own",
        )
    number = re.match(r"\d+", engine.version)
    if number is not None and int(number[0]) < OLDEST:
        raise EngineTooOld(
            f"the Docker Engine at {engine.host} is version {engine.version}; {OLDEST} or newer is needed",
            hint="upgrade it, or name another engine in DOCKER_HOST",
        )
    return engine


def at_address(host: str, source: str, tls: Tls | None = None) -> Engine:
    """The engine at an address; raises `EngineSilent`, `SocketForbidden`, `EngineTooOld` or `AddressInvalid`."""
    try:
        answers = _ask(host, source, tls)
    except PermissionError as error:
        raise _forbidden(host.removeprefix("unix://"), source) from error
    except OSError as error:
        raise _silent(host, source, error) from error
    return _checked(engine_from(host, source, answers, tls), podman=answers.podman)


def find(env: Mapping[str, str] | None = None, default_socket: Path = wire.DEFAULT_SOCKET) -> Engine | None:
    """Return the engine that answers, None where there is none and none was named.

    An engine that DOCKER_HOST or a context names must answer: nothing else is looked for then. (Our private one may
    be named too; it counts as private, and as absent when it or its containerd does not run.) Raises an `DockerError`
    per cause: named and silent, forbidden, unknown context, too old, not Docker.
    """
    env = os.environ if env is None else env
    named = contexts.named(env)
    own = places()
    if named is not None and named.host != own.host:
        return at_address(named.host, named.source, named.tls)
    if named is None and _somebody_at(default_socket):
        return at_address(f"unix://{default_socket}", "default socket")
    try:
        if containerd_pid(own) is None:
            return None
        wire.ping(wire.unix(own.socket))
    except OSError:
        return None  # also while another process starts it: whoever needs it waits for the lock
    return at_address(own.host, "private")


def _somebody_at(path: Path) -> bool:
    """Whether a process serves the socket at `path`: a file that nobody serves counts as nobody."""
    try:
        with wire.connected(wire.unix(path), timeout=5.0):
            return True
    except PermissionError as error:
        raise _forbidden(str(path), "default socket") from error
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return False
    except OSError as error:
        raise _silent(f"unix://{path}", "default socket", error) from error
