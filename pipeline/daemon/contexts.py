"""Which engine the docker CLI would talk to: DOCKER_HOST, DOCKER_CONTEXT, the current context, the default socket.

$DOCKER_CONFIG or ~/.docker/
    config.json                               currentContext
    contexts/meta/<sha256 of the name>/meta.json
    contexts/tls/<sha256 of the name>/docker/{ca,cert,key}.pem
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_bytes

from .errors import ContextUnknown
from .facts import Tls

_BACK = "`docker context ls` lists them; `docker context use default` goes back to the default socket"


@dataclass(frozen=True)
class Named:
    """An engine that somebody asked for: its address, who asked for it, how TLS is done."""

    host: str
    source: str
    tls: Tls | None = None


def config_folder(env: Mapping[str, str]) -> Path:
    """The docker CLI's folder."""
    return Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME") or Path.home()) / ".docker")


def _load(path: Path, what: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContextUnknown(
            f"{what} cannot be read: {path}: {error}", hint=f"mend {path}, or set DOCKER_HOST"
        ) from error
    if not isinstance(value, dict):
        raise ContextUnknown(f"{what} is no JSON object: {path}", hint=f"mend {path}, or set DOCKER_HOST")
    return value


def _from_environment(env: Mapping[str, str]) -> Named | None:
    host = env.get("DOCKER_HOST", "")
    if not host:
        return None
    verify = bool(env.get("DOCKER_TLS_VERIFY"))
    if not verify and not env.get("DOCKER_TLS"):
        return Named(host, "DOCKER_HOST")
    folder = Path(env.get("DOCKER_CERT_PATH") or config_folder(env))
    return Named(host, "DOCKER_HOST", Tls(str(folder), verify=verify))


def _context(name: str, asked_by: str, env: Mapping[str, str]) -> Named:
    folder = config_folder(env) / "contexts"
    identity = sha256_bytes(name.encode())
    meta = folder / "meta" / identity / "meta.json"
    if not meta.is_file():
        raise ContextUnknown(f"there is no docker context {name!r}, which {asked_by} names", hint=_BACK)
    endpoint = _load(meta, f"docker context {name!r}").get("Endpoints", {})
    docker = endpoint.get("docker") if isinstance(endpoint, dict) else None
    host = docker.get("Host") if isinstance(docker, dict) else None
    if not isinstance(docker, dict) or not isinstance(host, str) or not host:
        raise ContextUnknown(f"docker context {name!r} names no engine: {meta}", hint=_BACK)
    certificates = folder / "tls" / identity / "docker"
    tls = Tls(str(certificates), verify=not docker.get("SkipTLSVerify")) if certificates.is_dir() else None
    return Named(host, f"context {name}", tls)


def named(env: Mapping[str, str]) -> Named | None:
    """The engine that is asked for, None for the default socket; the CLI's own order.

    Raises `ContextUnknown` for a context that does not exist or a file that cannot be read.
    """
    found = _from_environment(env)
    if found is not None:
        return found
    name, asked_by = env.get("DOCKER_CONTEXT", ""), "DOCKER_CONTEXT"
    if not name:
        config = config_folder(env) / "config.json"
        if not config.is_file():
            return None
        name, asked_by = str(_load(config, "docker's configuration").get("currentContext") or ""), str(config)
    return None if name in {"", "default"} else _context(name, asked_by, env)
