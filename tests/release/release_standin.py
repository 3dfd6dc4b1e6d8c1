"""A server that plays a registry, a token server or an attacker: a function answers, and every request is kept."""

from __future__ import annotations

import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    form: dict[str, str]

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")


Answer = tuple[int, dict[str, str], bytes]


class Standin(ThreadingHTTPServer):
    """`answer` gets each request; `seen` keeps them all."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Request], Answer], port: int = 0) -> None:
        self.answer = answer
        self.seen: list[Request] = []
        super().__init__(("127.0.0.1", port), _Handler)
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.host}"

    def secrets(self) -> list[str]:
        """What was sent that could hold a credential."""
        return [one.authorization for one in self.seen if one.authorization] + [
            one.form["refresh_token"] for one in self.seen if "refresh_token" in one.form
        ]

    def __enter__(self) -> Standin:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Standin

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        place = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        request = Request(
            self.command, place.path, dict(urllib.parse.parse_qsl(place.query)),
            {name.lower(): value for name, value in self.headers.items()}, dict(urllib.parse.parse_qsl(body)),
        )  # fmt: skip
        self.server.seen.append(request)
        status, headers, data = self.server.answer(request)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any
