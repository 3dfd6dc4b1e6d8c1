"""The docker SDK, imported only here and only when asked for: it takes longer to import than an engine to answer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EngineSilent, SshMissing
from .facts import Answers, Engine, Tls

if TYPE_CHECKING:
    from docker import DockerClient

_TIMEOUT = 60  # s, per request; streams and waits set their own
_FIND_TIMEOUT = 15  # s
_ANY_API = "1.44"  # which engines from 25 on take; only until the engine has named its own


def _open(host: str, tls: Tls | None, version: str, timeout: int) -> DockerClient:
    from docker.errors import DockerException
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
    try:
        # The ssh program, not paramiko's own client: it knows the user's keys, agent and jump hosts.
        client = DockerClient(base_url=host, version=version, tls=config, timeout=timeout, use_ssh_client=True)
    except DockerException as error:
        if not isinstance(error.__cause__, NameError):  # that is how the SDK notices that its ssh support is missing
            raise
        raise SshMissing(
            f"{host} needs the docker SDK's ssh support, which is not installed",
            hint="pip install paramiko, or forward the engine's socket with `ssh -L` and name that in DOCKER_HOST",
        ) from error
    if tls is not None:
        # Else REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE, where set, would win over the engine's own certificates.
        client.api.trust_env = False
    return client


def connect(engine: Engine, *, timeout: int = _TIMEOUT) -> DockerClient:
    """A client for an engine that was found; `timeout` in seconds per request. The caller closes it.

    Raises `EngineSilent` when the engine has gone meanwhile.
    """
    from docker.errors import DockerException

    try:
        return _open(engine.host, engine.tls, engine.api_version or _ANY_API, timeout)
    except (DockerException, OSError) as error:
        raise EngineSilent(
            f"the Docker Engine at {engine.host} does not answer: {error}", hint="pipeline engine status"
        ) from error


def ask(host: str, tls: Tls | None) -> Answers:
    """What an engine says of itself, for addresses that need ssh or TLS; raises OSError when nobody answers."""
    import requests
    from docker.errors import DockerException

    try:
        with contextlib.closing(_open(host, tls, _ANY_API, _FIND_TIMEOUT)) as client:
            version = client.version(api_version=False)
        api_version = str(version.get("ApiVersion", ""))
        with contextlib.closing(_open(host, tls, api_version or _ANY_API, _FIND_TIMEOUT)) as client:
            info = client.info()
    except (DockerException, requests.RequestException) as error:
        raise OSError(str(error)) from error
    parts = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    return Answers(info, api_version, podman=any("podman" in p.lower() for p in parts))
