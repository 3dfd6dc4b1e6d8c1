"""HTTP to one registry: to whom credentials go, what is followed, and what is tried again.

Credentials go to the registry that was asked and to the token server that it names, over TLS (or on the loopback), and
to nobody else: redirects are followed here, of reads alone, nothing is read from ~/.netrc, no cookie is kept, and a
challenge is answered only where the response came from the registry's own address.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import random
from typing import IO, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests.utils
import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader, NewConnectionError, ProxyError, SSLError, TimeoutError

from pipeline.contract.text import shown

from .credentials import Credentials, Login, is_plain, trust
from .errors import InvalidResponse, RegistryError, TransientError, refusal
from .reference import api_host, is_loopback

AGENT = "tuned-image-pipeline"
_REDIRECTS = 5
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_LIMIT = 4 << 20  # bytes of a body unless the request says otherwise; what registries take for a manifest
_ERROR_LIMIT = 65_536  # bytes of an error's body that are looked at
_SLOWEST = 10_000  # bytes a second, after `RetryPolicy.silence` seconds: a body that comes slower is given up
_BLOCK = 1 << 20
_CONNECTIONS = 8  # that are kept open to one host
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RetryPolicy:
    """`tries` of each operation in all. Waits between them grow from `pause` seconds, twice as long each time, up to
    `longest`, which is also the longest Retry-After that is honoured. `connect` and `silence` are the seconds to wait
    for a connection and for the next bytes, `commit` those that a registry may take to store an uploaded blob.
    """

    tries: int = 5
    pause: float = 0.5
    longest: float = 60.0
    connect: float = 10.0
    silence: float = 60.0
    commit: float = 900.0

    def call(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation until it raises no `TransientError`; raise the last one's cause when tries are used up."""
        for attempt in range(1, self.tries + 1):
            try:
                return operation()
            except TransientError as error:
                asked = error.retry_after
                if asked is not None and asked > self.longest:
                    raise RegistryError(
                        f"{error.cause.message}; it asks to come back in {asked:.0f} s",
                        hint=f"run it again then: this command waits {self.longest:.0f} s at most",
                    ) from error
                if attempt == self.tries:
                    raise error.cause from error
                own = min(self.longest, self.pause * 2 ** (attempt - 1)) * (1 + random() / 2)  # noqa: S311
                time.sleep(own if asked is None else asked)
        raise AssertionError("a policy of no tries")


@dataclass(frozen=True)
class Request:
    """What is asked of a registry; `what` says it in messages.

    `path` begins with a slash, or is an address that the registry named. `accept` lists the statuses that are no
    error. The body of the response has `limit` bytes at most, and is written to `into` where that is given.
    """

    method: str
    path: str
    repository: str
    what: str
    accept: tuple[int, ...]
    push: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Path = b""
    silence: float = 0.0  # seconds in place of the policy's
    limit: int = _LIMIT
    into: IO[bytes] | None = None

    @property
    def scope(self) -> str:
        """What a token must allow."""
        return f"repository:{self.repository}:pull{',push' if self.push else ''}"


@dataclass(frozen=True)
class Answer:
    """A response: `address` is the one that answered, `body` empty where it was written into a file."""

    status: int
    headers: Mapping[str, str]
    address: str
    body: bytes = b""


class Transport:
    """Requests to one registry: plain HTTP on the loopback unless certs.d names it, else TLS."""

    def __init__(self, registry: str, credentials: Credentials, policy: RetryPolicy) -> None:
        self.registry = registry
        self.policy = policy
        host = api_host(registry)
        self._credentials = credentials
        self._plain = is_plain(host)
        self._base = f"{'http' if self._plain else 'https'}://{host}"
        self._trust = {True: trust(host), False: trust("")}  # by whether an address is the registry's own
        self._pools: dict[tuple[str, bool], urllib3.PoolManager] = {}
        self._authorizations: dict[str, str] = {}  # by scope
        self._reached = False

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.clear()

    def call(self, asked: Request) -> Answer:
        """A request, tried again as the policy has it. Raises `RegistryError`."""
        return self.policy.call(lambda: self.once(asked))

    def once(self, asked: Request) -> Answer:
        """A request, its challenge answered. Raises `TransientError` for what may pass, else a `RegistryError`."""
        silence = asked.silence or self.policy.silence
        with self._translated(asked.what, silence):
            given = self._authorizations.get(asked.scope, "")
            response, address = self._follow(asked, given, silence)
            if response.status == 401 and self._is_ours(address):
                try:
                    new = self._authorization(response.headers.get("WWW-Authenticate", ""), asked)
                except BaseException:
                    _end(response)
                    raise
                if new not in ("", given):
                    _end(response)
                    self._authorizations[asked.scope] = new
                    response, address = self._follow(asked, new, silence)
            self._check(response, address, asked.accept, asked.what)
            memory = io.BytesIO()
            out = asked.into or memory
            out.seek(0)  # an earlier try may have broken off
            out.truncate()
            self._read(response, out, asked.limit)
            return Answer(response.status, response.headers, address, memory.getvalue())

    def _follow(self, asked: Request, given: str, silence: float) -> tuple[urllib3.BaseHTTPResponse, str]:
        """Send, and follow redirects of a read. Credentials go to the registry's own address alone."""
        address = asked.path if "://" in asked.path else self._base + asked.path
        for _ in range(_REDIRECTS + 1):
            own = {"Authorization": given} if given and self._is_ours(address) else {}
            response = self._send(asked.method, address, {**asked.headers, **own}, asked.body, silence)
            place = response.headers.get("Location", "")
            if asked.method not in ("GET", "HEAD") or response.status not in (301, 302, 303, 307, 308) or not place:
                return response, address
            _end(response)
            address = joined(address, place)
        raise InvalidResponse(f"{self.registry} redirects in a circle")

    def _send(
        self, method: str, address: str, headers: Mapping[str, str], body: bytes | Path, silence: float
    ) -> urllib3.BaseHTTPResponse:
        """Send one request to one address, which must be TLS or, where the registry is on it, the loopback."""
        origin = _origin(address)
        if origin is None or (origin[0] != "https" and not (self._plain and is_loopback(origin[1]))):
            raise InvalidResponse(f"{self.registry} leads to {_place(address)}, which is not encrypted or no address")
        with contextlib.ExitStack() as stack:
            size = len(body) if isinstance(body, bytes) else body.stat().st_size
            length = {"Content-Length": str(size)} if method in ("PUT", "POST") else {}
            response = self._pool(address).urlopen(
                method,
                address,
                body=stack.enter_context(body.open("rb")) if isinstance(body, Path) else body or None,
                headers={"User-Agent": AGENT, **length, **headers},
                timeout=urllib3.Timeout(connect=self.policy.connect, read=silence),
                redirect=False,
                retries=False,
                preload_content=False,
            )
        self._reached |= self._is_ours(address)
        return response

    def _pool(self, address: str) -> urllib3.PoolManager:
        """The connections for an address; through the environment's proxies, but never towards the loopback."""
        proxy, ours = _proxy(address), self._is_ours(address)
        if (proxy, ours) not in self._pools:
            context = self._trust[ours]
            made = urllib3.PoolManager(maxsize=_CONNECTIONS, ssl_context=context)
            if proxy:
                made = _through(proxy, context)
            self._pools.setdefault((proxy, ours), made)
        return self._pools[proxy, ours]

    def _is_ours(self, address: str) -> bool:
        """Whether an address belongs to the registry that was asked."""
        return _origin(address) == _origin(self._base)

    def _authorization(self, header: str, asked: Request) -> str:
        """The answer to a challenge, as a value of `Authorization`; empty where the header has none."""
        known = challenges(header)
        if not known:
            return ""
        login = self._credentials.login(self.registry, asked.repository)
        if "realm" in known.get("bearer", {}):
            return "Bearer " + self._token(known["bearer"], login, asked.scope)
        if "basic" not in known:
            kinds = shown(", ".join(known), 80)
            raise InvalidResponse(f"{self.registry} wants authentication of an unknown kind: {kinds}")
        if login is None:
            raise RegistryError(
                f"{self.registry} wants a password and none is known for it",
                hint=f"`docker login {self.registry}`; credentials are read from Docker's config.json",
            )
        return _basic(login)

    def _token(self, challenge: Mapping[str, str], login: Login | None, scope: str) -> str:
        """A token from the server that the registry names. It is asked once, there, and no redirect is followed."""
        realm = challenge["realm"]
        asked = {"service": challenge.get("service", ""), "scope": scope}
        if login is not None and login.identity_token:  # OAuth 2, as Docker's token servers take it
            grant = {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": AGENT}
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._send("POST", realm, kind, urlencode({**grant, **asked}).encode(), self.policy.silence)
        else:
            address = f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}"
            own = {"Authorization": _basic(login)} if login is not None else {}
            response = self._send("GET", address, own, b"", self.policy.silence)
        if 300 <= response.status < 400:
            _end(response)
            raise InvalidResponse(f"{_place(realm)} redirects, and credentials are not sent on")
        self._check(response, realm, (200,), f"a token for {scope}")
        try:
            out = io.BytesIO()
            self._read(response, out, _LIMIT)
            value = json.loads(out.getvalue())
            token = str(value.get("token") or value["access_token"])
        except (ValueError, KeyError, AttributeError, RecursionError, TypeError) as error:
            raise InvalidResponse(f"{_place(realm)} returned no token") from error
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise InvalidResponse(f"{_place(realm)} returned no token")
        return token

    def _check(self, response: urllib3.BaseHTTPResponse, address: str, accept: tuple[int, ...], what: str) -> None:
        """Return when the status is among `accept`; else raise `TransientError`, or the error of the cause."""
        if response.status in accept:
            return
        try:  # the registry's own words
            out = io.BytesIO()
            self._read(response, out, _ERROR_LIMIT)
            listed = json.loads(out.getvalue())["errors"]
            parts = [" ".join(str(e.get(k)) for k in ("code", "message", "detail") if e.get(k)) for e in listed]
        except Exception:  # noqa: BLE001 - whatever an error page is made of, it is not worth another error
            parts = []
        server = self.registry if self._is_ours(address) else _place(address)
        error = refusal(response.status, shown("; ".join(parts), 300), what, server)
        # Seen of docker-registry 2.8 while another host pushed the same manifest: its file was being written.
        if response.status in _TRANSIENT or "MANIFEST_BLOB_UNKNOWN" in error.message:
            raise TransientError(error, _retry_after(response.headers.get("Retry-After", "")))
        raise error

    def _read(self, response: urllib3.BaseHTTPResponse, out: IO[bytes], limit: int) -> None:
        """Copy the body. Raises `InvalidResponse` above `limit` bytes, `RegistryError` when it comes too slowly."""
        began, size = time.monotonic(), 0
        # read1: what has come, however little, so that the clock is looked at while a registry sends byte by byte
        try:
            while block := response.read1(_BLOCK, decode_content=False):
                size += len(block)
                if size > limit:
                    raise InvalidResponse(f"the response exceeds the size limit of {limit:,} bytes")
                if time.monotonic() - began > self.policy.silence + size / _SLOWEST:
                    raise RegistryError("the registry sends less than 10 kB a second", hint="run it again later")
                out.write(block)
        finally:
            _end(response)

    @contextlib.contextmanager
    def _translated(self, what: str, silence: float) -> Iterator[None]:
        """Name each failure of the connection; also while a response's body is read."""
        host = self.registry
        try:
            yield
        except SSLError as error:
            if "WRONG_VERSION_NUMBER" in str(error):
                raise RegistryError(
                    f"{what}: {host} does not speak TLS",
                    hint="without TLS only the loopback is spoken to: put TLS before the registry",
                ) from error
            raise RegistryError(
                f"{what}: the certificate of {host} is not trusted: {_reason(_innermost(error))}",
                hint=f"put its authority into /etc/docker/certs.d/{host}/ca.crt, or name it in SSL_CERT_FILE",
            ) from error
        except HTTPError as error:
            if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
                message = f"{what}: {host} did not answer for {silence:.0f} s"
                raise TransientError(RegistryError(message, hint="is it overloaded? Run it again")) from error
            inner = _innermost(error)
            failed = RegistryError(
                f"{what}: no connection to {host}, or it was dropped: {_reason(inner)}",
                hint="does the registry run, and is the name right? Then run it again",
            )
            if isinstance(error, ProxyError):
                proxy = _proxy(self._base)
                where = f"the proxy {_place(_whole(proxy))} ({_variable(proxy)})"
                failed = RegistryError(
                    f"{what}: {where} gives no connection to {host}: {_reason(inner)}",
                    hint="does the proxy run, and is its name right? NO_PROXY names hosts that need none",
                )
            # A registry that has answered already restarts; of one that never did the name or the port is wrong.
            wrong = isinstance(inner, ConnectionRefusedError) or getattr(inner, "errno", 0) == socket.EAI_NONAME
            raise (failed if wrong and not self._reached else TransientError(failed)) from error


def _proxy(address: str) -> str:
    """The proxy that the environment names for an address; empty for none, and for the loopback."""
    if is_loopback(urlsplit(address).netloc):
        return ""
    return requests.utils.select_proxy(address, requests.utils.get_environ_proxies(address)) or ""


def _through(proxy: str, context: ssl.SSLContext) -> urllib3.PoolManager:
    """Connections through a proxy. Raises `RegistryError` for what is no http or https proxy's address."""
    whole = _whole(proxy)
    try:
        user, password = requests.utils.get_auth_from_url(whole)
        login = urllib3.make_headers(proxy_basic_auth=f"{user}:{password}") if user else None
        return urllib3.ProxyManager(
            whole, maxsize=_CONNECTIONS, ssl_context=context, proxy_headers=login, proxy_ssl_context=trust("")
        )
    except (HTTPError, ValueError) as error:
        raise RegistryError(
            f"{_variable(proxy)} is not a proxy's address", hint="http://HOST:PORT or https://HOST:PORT is expected"
        ) from error


def _whole(proxy: str) -> str:
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(proxy: str) -> str:
    """The variable that names a proxy."""
    names = [name for name in sorted(os.environ) if name.lower().endswith("_proxy") and os.environ[name] == proxy]
    return names[0] if names else "the environment's"


def challenges(header: str) -> dict[str, dict[str, str]]:
    """The parameters of each scheme (in lower case) in a `WWW-Authenticate` header, which may have several (RFC 9110):
    `Bearer realm="…", Basic realm="…"`. Of two of one scheme the first counts.
    """
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for name, quoted, plain in _CHALLENGE_PART.findall(header):
        if quoted or plain:
            current.setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted[1:-1]) if quoted else plain)
        else:
            current = {}
            found.setdefault(name.lower(), current)
    return found


_CHALLENGE_PART = re.compile(r"([\w!#$%&'*+.^`|~-]+)(?:\s*=\s*(?:(\"(?:[^\"\\]|\\.)*\")|([^\s,\"]+)))?")


def joined(address: str, place: str) -> str:
    """The address that a registry's answer names, which may be relative to what was asked; raise `InvalidResponse`."""
    try:
        return urljoin(address, place)
    except ValueError as error:
        raise InvalidResponse(f"{shown(place, 80)}, which the registry names, is no address") from error


def _end(response: urllib3.BaseHTTPResponse) -> None:
    """Let go of a response: its connection is closed unless its body was read, and may then be used again."""
    response.close()
    response.release_conn()


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def _origin(address: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None for what is no plain http or https address, one with a user in it included."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or "\\" in address:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, host.lower(), port


def _place(address: str) -> str:
    """The host of an address, which may carry secrets elsewhere."""
    try:
        return shown(urlsplit(address).netloc.rpartition("@")[2] or address.partition("?")[0], 80)
    except ValueError:
        return "an address that cannot be read"


def _retry_after(value: str) -> float | None:
    with contextlib.suppress(InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().parse_retry_after(value) if value else None
    return None


def _innermost(error: BaseException) -> BaseException:
    """What an error of urllib3 began with; its own text has addresses, and their secrets."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return shown(error.verify_message, 120)
    said = (error.strerror or str(error)) if isinstance(error, OSError) else ""
    return shown(said or type(error).__name__, 120)
