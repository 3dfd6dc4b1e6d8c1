"""The cheap way to ask an engine something: one GET over a socket, without importing the docker SDK.

Enough to find an engine and to read its facts in a few milliseconds; everything else goes through `client`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AddressInvalid

DEFAULT_SOCKET = Path("/var/run/docker.sock")
_PORT = 2375
_LONGEST_PATH = 107  # bytes of sun_path, without its final zero (unix(7))


@dataclass(frozen=True)
class Address:
    """An engine's address in parts: `unix` with a path, or `tcp`, `http`, `https`, `ssh` with host and port."""

    text: str
    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0


def unix(path: Path) -> Address:
    """The address of a socket on this machine."""
    return Address(f"unix://{path}", "unix", path=str(path))


def parse_address(text: str, where: str) -> Address:
    """Read an engine address as the docker CLI spells it; raise `AddressInvalid` naming `where` it came from."""
    if text.startswith("unix:///") and len(text.encode()) - len("unix://") <= _LONGEST_PATH:
        return Address(text, "unix", path=text.removeprefix("unix://"))
    from urllib.parse import urlsplit

    hint = "write unix:///path/to/docker.sock, tcp://host:2375 or ssh://user@host"
    whole = text if "://" in text else f"tcp://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError as error:
        raise AddressInvalid(f"{where} is {text!r}: {error}", hint=hint) from error
    if parts.scheme == "unix":
        raise AddressInvalid(f"{where} is {text!r}: no absolute path of at most {_LONGEST_PATH} bytes", hint=hint)
    if parts.scheme in {"tcp", "http", "https", "ssh"} and parts.hostname:
        return Address(whole, parts.scheme, host=parts.hostname, port=port or _PORT)
    raise AddressInvalid(f"{where} is {text!r}, which is no engine address", hint=hint)


@dataclass(frozen=True)
class Answer:
    """Header names in lower case, and the body."""

    headers: Mapping[str, str]
    body: bytes


def connected(address: Address, timeout: float) -> socket.socket:
    """A socket connected to a `unix`, `tcp` or `http` address; raises `OSError`."""
    if address.scheme != "unix":
        return socket.create_connection((address.host, address.port), timeout)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address.path)
    except OSError:
        connection.close()
        raise
    return connection


def get(address: Address, path: str, *, timeout: float = 5.0) -> Answer:
    """Return the answer to one GET at a `unix`, `tcp` or `http` address.

    `timeout` is in seconds, per socket operation. Raises `OSError` when nobody answers (`PermissionError`,
    `FileNotFoundError`, `ConnectionRefusedError`, `TimeoutError` say why) or when the answer is not HTTP 200.

    HTTP/1.0 on a bare socket: the answer ends with the connection and is never chunked (RFC 1945), and
    http.client takes as long to import as an engine takes to answer.
    """
    received = []
    with connected(address, timeout) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n".encode("ascii"))
        while block := connection.recv(1 << 16):
            received.append(block)
    head, _, body = b"".join(received).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/"):
        raise OSError("what answers there does not speak HTTP")
    if words[1] != "200":
        raise OSError(f"GET {path} gave HTTP {words[1]}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(body) < int(length):
        raise OSError(f"GET {path} was cut off")
    return Answer(headers, body)


def get_json(address: Address, path: str, *, timeout: float = 5.0) -> dict[str, Any]:
    """Like `get`, for a JSON object; anything else in the body is an `OSError` too."""
    import json

    try:
        value = json.loads(get(address, path, timeout=timeout).body)
    except ValueError as error:
        raise OSError(f"GET {path} gave no JSON: {error}") from error
    if not isinstance(value, dict):
        raise OSError(f"GET {path} gave no JSON object")
    return value


def ping(address: Address, *, timeout: float = 5.0) -> Answer:
    """Return an engine's answer to a ping, whose headers name the API version; raise `OSError` as `get` does."""
    return get(address, "/_ping", timeout=timeout)
