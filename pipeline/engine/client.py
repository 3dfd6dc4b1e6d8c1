"""The docker SDK, imported only here and only when asked for: it takes longer to import than an engine to answer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EngineSilent
from .facts import Answers, Engine, Tls

if TYPE_CHECKING:
    from docker import DockerClient

_TIMEOUT = 60  # s, per request; streams and waits set their own
_FIND_TIMEOUT = 15  # s


def _open(host: str, tls: Tls | None, version: str, timeout: int) -> DockerClient:
    from docker.tls import TLSConfig

    from docker import DockerClient

    config: Any = False
    if tls is not None:
        pair = (f"{tls.folder}/cert.pem", f"{tls.folder}/key.pem")
        config = TLSConfig(
            client_cert=pair if all(Path(p).is_file() for p in pair) else None,
            ca_cert=f"{tls.folder}/ca.pem" if tls.verify else None,
            verify=tls.verify,
        )
    # The ssh program, not paramiko: it knows the user's keys, agent and jump hosts.
    return DockerClient(base_url=host, version=version, tls=config, timeout=timeout, use_ssh_client=True)


def connect(engine: Engine, *, timeout: int = _TIMEOUT) -> DockerClient:
    """A client for an engine that was found; `timeout` in seconds per request. The caller closes it.

    Raises `EngineSilent` when the engine has gone meanwhile.
    """
    from docker.errors import DockerException

    try:
        return _open(engine.host, engine.tls, engine.api_version or "auto", timeout)
    except (DockerException, OSError) as error:
        raise EngineSilent(
            f"the Docker Engine at {engine.host} does not answer: {error}", hint="pipeline engine status"
        ) from error


def ask(host: str, tls: Tls | None) -> Answers:
    """What an engine says of itself, for addresses that need ssh or TLS; raises OSError when nobody answers."""
    import requests
    from docker.errors import DockerException

    try:
        with contextlib.closing(_open(host, tls, "auto", _FIND_TIMEOUT)) as client:
            version, info = client.version(), client.info()
    except (DockerException, requests.RequestException) as error:
        raise OSError(str(error)) from error
    parts = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    return Answers(info, str(version.get("ApiVersion", "")), podman=any("podman" in p.lower() for p in parts))
