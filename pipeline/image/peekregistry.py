"""A registry on the loopback that says it has everything but the few blobs that it is told to want.

It speaks what the engine's push asks of the OCI distribution API, for the seconds of one look at one image. It
never takes the image's own manifest or index: it keeps the bytes and refuses them. The push so fails at its very last
step, and the engine does not note on the image's blobs that this registry has them, as it does when a push went well.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import cast
from urllib.parse import parse_qs, urlsplit

from pipeline.contract.digest import sha256_bytes

LARGEST_MANIFEST = 4 * 1024 * 1024  # bytes; the distribution specification's own advice
_PATIENCE = 5.0  # s, for each read from a connection
_TOGETHER = 0.3  # s; Engine 26 pushes an index's manifests side by side, and gives all up when one was refused
_TLS_HANDSHAKE = b"\x16"


class Registry:
    """What repository `name` was given, and what it wants; `top` is the digest of the manifest or index to refuse."""

    def __init__(self, name: str, top: str) -> None:
        self.name, self.top = name, top
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.wanted: Mapping[str, int] = {}

    def want(self, blobs: Mapping[str, int]) -> None:
        """From now on lack these blobs; digests with their sizes in bytes."""
        self.wanted = dict(blobs)


@contextlib.contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """Serve it on a free port of 127.0.0.1; give the repository as an engine names it, 127.0.0.1:port/name.

    The registry's name should be one that nobody can guess: whoever knows it may put manifests here.
    """
    with _Server(registry) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}/{registry.name}"
        finally:
            server.shutdown()


class _Server(ThreadingTCPServer):
    """Not http.server's own, which asks the resolver for this host's name."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the push tells that it was not answered."""


class _Handler(BaseHTTPRequestHandler):
    """One request per connection."""

    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE

    @property
    def _registry(self) -> Registry:
        return cast(_Server, self.server).registry

    def handle(self) -> None:
        """Answer; a TLS handshake too, and in plain HTTP: by that the engine knows to ask again without TLS."""
        if self.connection.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            self.connection.sendall(b"HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\n")
        else:
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """`/v2/`: this is a registry."""
        self._answer(HTTPStatus.OK if self.path == "/v2/" else HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """Every blob is here that is not wanted; no manifest is."""
        kind, _, digest = self._inside().partition("/")
        registry = self._registry
        here = kind == "blobs" and (digest not in registry.wanted or digest in registry.blobs)
        self._answer(HTTPStatus.OK if here else HTTPStatus.NOT_FOUND, digest)

    def do_POST(self) -> None:
        """Begin an upload."""
        if self._inside().rstrip("/") != "blobs/uploads":
            self._answer(HTTPStatus.NOT_FOUND)
            return
        self._answer(HTTPStatus.ACCEPTED, place=f"/v2/{self._registry.name}/blobs/uploads/one")

    def do_PUT(self) -> None:
        """Take a wanted blob, or a manifest."""
        kind, _, reference = self._inside().partition("/")
        if kind == "manifests":
            self._manifest(reference)
        elif kind == "blobs":
            self._blob("".join(parse_qs(urlsplit(self.path).query).get("digest", ())))
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def _manifest(self, reference: str) -> None:
        body = self._body(LARGEST_MANIFEST)
        if body is None:
            return
        digest = f"sha256:{sha256_bytes(body)}"
        if ":" in reference and reference != digest:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        self._registry.manifests[digest] = body
        if ":" in reference:  # one of an index, which newer engines push by digest, and the index after it
            self._answer(HTTPStatus.CREATED, digest)
            return
        if digest != self._registry.top:
            time.sleep(_TOGETHER)
        self._answer(HTTPStatus.BAD_REQUEST)

    def _blob(self, digest: str) -> None:
        size = self._registry.wanted.get(digest)
        if size is None:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        body = self._body(size)
        if body is None:
            return
        if f"sha256:{sha256_bytes(body)}" != digest:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        self._registry.blobs[digest] = body
        self._answer(HTTPStatus.CREATED, digest)

    def _body(self, most: int) -> bytes | None:
        """The request's body; None when it has another length than it says or a longer one than `most`: answered."""
        said = self.headers.get("Content-Length", "")
        if not said.isdecimal() or int(said) > most:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE if said else HTTPStatus.LENGTH_REQUIRED)
            return None
        body = self.rfile.read(int(said))
        if len(body) != int(said):
            self._answer(HTTPStatus.BAD_REQUEST)
            return None
        return body

    def _inside(self) -> str:
        """The path within the repository, empty for a path elsewhere."""
        path, inside = urlsplit(self.path).path, f"/v2/{self._registry.name}/"
        return path.removeprefix(inside) if path.startswith(inside) else ""

    def _answer(self, status: HTTPStatus, digest: str = "", place: str = "") -> None:
        self.send_response(status)
        for name, value in (("Docker-Content-Digest", digest), ("Location", place)):
            if value and status < HTTPStatus.BAD_REQUEST:
                self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
