"""Finding an engine that answers, in the docker CLI's own order, then our private one."""

from __future__ import annotations

import contextlib
import grp
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import contexts, wire
from .errors import EngineSilent, EngineTooOld, SocketForbidden
from .facts import OLDEST, Engine, Tls, engine_from
from .places import places


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
    return EngineSilent(
        f"no Docker Engine answers at {host} ({source}): {_reason(error)}", hint=f"start that engine, or {undo}"
    )


def _ask(host: str, source: str, tls: Tls | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """/version and /info of an engine; raises OSError when it does not answer."""
    address = wire.parse_address(host, source)
    if tls is None and address.scheme in {"unix", "tcp", "http"}:
        return wire.get_json(address, "/version"), wire.get_json(address, "/info", timeout=15.0)
    from .client import facts_of  # ssh and TLS are the docker SDK's

    return facts_of(address.text, tls)


def _checked(engine: Engine, version: Mapping[str, Any]) -> Engine:
    parts = [str(c.get("Name", "")) for c in version.get("Components") or () if isinstance(c, dict)]
    if any("podman" in p.lower() for p in parts):
        raise EngineTooOld(
            f"{engine.host} ({engine.source}) is Podman, not a Docker Engine",
            hint="name a Docker Engine in DOCKER_HOST",
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
        version, info = _ask(host, source, tls)
    except PermissionError as error:
        raise _forbidden(host.removeprefix("unix://"), source) from error
    except OSError as error:
        raise _silent(host, source, error) from error
    return _checked(engine_from(host, source, version, info, tls), version)


def find(env: Mapping[str, str] | None = None, default_socket: Path = wire.DEFAULT_SOCKET) -> Engine | None:
    """Return the engine that answers, None where there is none and none was named.

    An engine that DOCKER_HOST or a context names must answer: nothing else is looked for then. Raises an
    `EngineError` per cause: named and silent, forbidden, unknown context, too old, not Docker.
    """
    env = os.environ if env is None else env
    named = contexts.named(env)
    if named is not None:
        return at_address(named.host, named.source, named.tls)
    for path, source in ((default_socket, "default socket"), (places().socket, "private")):
        address = wire.Address(f"unix://{path}", "unix", path=str(path))
        try:
            wire.ping(address)
        except PermissionError as error:
            raise _forbidden(str(path), source) from error
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            continue  # nobody is there; a socket file that nobody serves counts as nobody
        except OSError as error:
            raise _silent(address.text, source, error) from error
        return at_address(address.text, source)
    return None
