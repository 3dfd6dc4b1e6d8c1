"""The cheap way to ask an engine something: one GET over a socket, without importing the docker SDK.

Enough to find an engine and to read its facts in a few milliseconds; everything else goes through `client`.
"""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import AddressInvalid

DEFAULT_SOCKET = Path("/var/run/docker.sock")
_PORT = 2375
_OK = 200
_LONGEST_PATH = 107  # bytes of sun_path, without its final zero (unix(7))


@dataclass(frozen=True)
class Address:
    """An engine's address in parts: `unix` with a path, or `tcp`, `http`, `https`, `ssh` with host and port."""

    text: str
    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0


def parse_address(text: str, where: str) -> Address:
    """Read an engine address as the docker CLI spells it; raise `AddressInvalid` naming `where` it came from."""
    hint = "write unix:///path/to/docker.sock, tcp://host:2375 or ssh://user@host"
    whole = text if "://" in text else f"tcp://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise AddressInvalid(f"{where} is {text!r}: {error}", hint=hint) from error
    if parts.scheme == "unix":
        path = whole.removeprefix("unix://")
        if not path.startswith("/") or len(path.encode()) > _LONGEST_PATH:
            raise AddressInvalid(f"{where} is {text!r}: no absolute path of at most {_LONGEST_PATH} bytes", hint=hint)
        return Address(text, "unix", path=path)
    if parts.scheme in {"tcp", "http", "https", "ssh"} and parts.hostname:
        return Address(whole, parts.scheme, host=parts.hostname, port=port or _PORT)
    raise AddressInvalid(f"{where} is {text!r}, which is no engine address", hint=hint)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(address: Address, path: str, *, timeout: float = 5.0) -> bytes:
    """Return the body of one GET to a `unix`, `tcp` or `http` address.

    `timeout` is in seconds, per socket operation. Raises `OSError` when nobody answers (`PermissionError`,
    `FileNotFoundError`, `ConnectionRefusedError`, `TimeoutError` say why) or when the answer is not HTTP 200.
    """
    if address.scheme == "unix":
        connection: http.client.HTTPConnection = _UnixConnection(address.path, timeout)
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()
    if response.status != _OK:
        raise OSError(f"GET {path} gave HTTP {response.status}")
    return body


def get_json(address: Address, path: str, *, timeout: float = 5.0) -> dict[str, Any]:
    """Like `get`, for a JSON object; anything else in the body is an `OSError` too."""
    try:
        value = json.loads(get(address, path, timeout=timeout))
    except ValueError as error:
        raise OSError(f"GET {path} gave no JSON: {error}") from error
    if not isinstance(value, dict):
        raise OSError(f"GET {path} gave no JSON object")
    return value


def ping(address: Address, *, timeout: float = 5.0) -> None:
    """Return when a Docker Engine answers at `address`; raise `OSError` as `get` does."""
    get(address, "/_ping", timeout=timeout)
