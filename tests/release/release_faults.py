"""An HTTP proxy in front of a registry that fails as a test asks, and counts what passes."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization"}


@dataclass
class Fault:
    """What happens to requests whose method and path match, `times` times (-1: always).

    `status` answers with it instead of asking the registry. `drop`: `request` reads half of what is sent and closes,
    `response` sends half of the answer's body (nothing where it has none) and closes, `now` closes at once. `wait` sleeps so many seconds first.
    `change` flips a byte of the answer's body. `drip` sends the answer's body so many seconds a byte.
    """

    method: str = ".*"
    path: str = ".*"
    times: int = -1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = "UNKNOWN"
    message: str = "a fault of a test"
    drop: str = ""
    wait: float = 0.0
    change: bool = False
    drip: float = 0.0
    hits: int = 0


@dataclass(frozen=True)
class Seen:
    """One request that came: its method, path, and the bytes of its body."""

    method: str
    path: str
    size: int
    at: float


class Proxy:
    """The proxy; `host` is its address, `faults` may be changed while it runs."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            proxy = outer

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                with contextlib.suppress(ConnectionError, socket.timeout):
                    _handle(self, outer)

            do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def fail(self, **what: object) -> Fault:
        fault = Fault(**what)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def count(self, method: str, path: str = ".*") -> int:
        return sum(bool(re.fullmatch(method, s.method) and re.search(path, s.path)) for s in self.seen)

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times != 0 and re.fullmatch(fault.method, method) and re.search(fault.path, path):
                    fault.times -= fault.times > 0
                    fault.hits += 1
                    return fault
        return None

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def _chunks(handler: BaseHTTPRequestHandler) -> bytes:
    out = b""
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        out += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return out


def _handle(handler: BaseHTTPRequestHandler, proxy: Proxy) -> None:
    method, path = handler.command, handler.path
    fault = proxy.fault_for(method, path)
    length = int(handler.headers.get("Content-Length") or 0)
    if fault is not None and fault.wait:
        time.sleep(fault.wait)
    if fault is not None and fault.drop in ("now", "request"):
        handler.rfile.read(length // 2 if fault.drop == "request" else 0)
        with proxy.lock:
            proxy.seen.append(Seen(method, path, 0, time.monotonic()))
        _cut(handler)
        return
    body = _chunks(handler) if handler.headers.get("Transfer-Encoding") == "chunked" else handler.rfile.read(length)
    with proxy.lock:
        proxy.seen.append(Seen(method, path, len(body), time.monotonic()))
    if fault is not None and fault.status:
        told = json.dumps({"errors": [{"code": fault.code, "message": fault.message}]}).encode()
        _answer(handler, fault.status, {"Content-Type": "application/json", **fault.headers}, told)
        return
    with contextlib.closing(http.client.HTTPConnection(proxy.upstream, timeout=60)) as upstream:
        # The host stays as it was asked: the registry names itself in Location by it.
        upstream.request(method, path, body, {k: v for k, v in handler.headers.items() if k.lower() not in _HOP})
        response = upstream.getresponse()
        data = response.read()
    headers = {k: v for k, v in response.getheaders() if k.lower() not in _HOP}
    if fault is not None and fault.change and data:
        data = bytes([data[0] ^ 1]) + data[1:]
    if fault is not None and fault.drip:
        _answer(handler, response.status, headers, data, only=0)
        for byte in data:
            handler.wfile.write(bytes([byte]))
            time.sleep(fault.drip)
        return
    if fault is not None and fault.drop == "response":
        if data:
            _answer(handler, response.status, headers, data, only=len(data) // 2)
        _cut(handler)
        return
    _answer(handler, response.status, headers, data)


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def _answer(
    handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], data: bytes, only: int | None = None
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        if handler.command == "HEAD" or name.lower() != "content-length":
            handler.send_header(name, value)
    if handler.command != "HEAD" and status != 204:
        handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data if only is None else data[:only])
        handler.wfile.flush()
