"""HTTP to one registry: which certificates are trusted, who is given credentials, and what is tried again.

Credentials go to the registry that was asked and to the token server that it names, over TLS (or on the loopback), and
to nobody else: redirects are followed here and not by requests, nothing is read from ~/.netrc, and a challenge is
answered only where the response came from the registry's own address.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import random
from typing import IO, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from .credentials import Credentials, Login
from .errors import (
    InvalidResponse,
    RegistryError,
    TransientError,
    Unauthorized,
    printable,
    refusal,
)
from .reference import api_host, is_loopback
from .trust import AGENT, Adapter, Session, is_plain, trust

_REDIRECTS = 5
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_ERROR_LIMIT = 65_536  # bytes of an error's body that are looked at
_TOKEN_LIMIT = 1 << 20  # bytes of an answer with a token
_SLOWEST = 10_000  # bytes a second, after `RetryPolicy.silence` seconds: a body that comes slower is given up
_BLOCK = 1 << 20
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
                        hint=f"run it again then: at most {self.longest:.0f} s are waited",
                    ) from error
                if attempt == self.tries:
                    raise error.cause from error
                own = min(self.longest, self.pause * 2 ** (attempt - 1)) * (1 + random() / 2)  # noqa: S311
                time.sleep(own if asked is None else asked)
        raise AssertionError("a policy of no tries")


# Challenges


@dataclass(frozen=True)
class Challenge:
    """One challenge of `WWW-Authenticate`: its scheme in lower case, and its parameters."""

    scheme: str
    parameters: Mapping[str, str]

    @staticmethod
    def parse(header: str) -> tuple[Challenge, ...]:
        """All challenges of a header, which may hold several (RFC 9110): `Bearer realm="…", Basic realm="…"`."""
        found: list[tuple[str, dict[str, str]]] = []
        for name, quoted, plain in _CHALLENGE_PART.findall(header):
            if quoted or plain:
                if found:
                    found[-1][1].setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted[1:-1]) if quoted else plain)
            else:
                found.append((name.lower(), {}))
        return tuple(Challenge(scheme, parameters) for scheme, parameters in found)


_CHALLENGE_PART = re.compile(r"([\w!#$%&'*+.^`|~-]+)(?:\s*=\s*(?:(\"(?:[^\"\\]|\\.)*\")|([^\s,\"]+)))?")


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


# Requests


class Transport:
    """Requests to one registry: plain HTTP on the loopback unless certs.d names it, else TLS."""

    def __init__(self, registry: str, credentials: Credentials, policy: RetryPolicy) -> None:
        self.registry = registry
        self.policy = policy
        host = api_host(registry)
        self._credentials = credentials
        self._plain = is_plain(host)
        self._base = f"{'http' if self._plain else 'https'}://{host}"
        self._session = Session()
        self._session.mount("https://", Adapter(trust("")))
        self._session.mount(f"https://{host}/", Adapter(trust(host)))
        self._answers: dict[str, str] = {}  # values of Authorization by scope

    def close(self) -> None:
        """Close all connections."""
        self._session.close()

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        path: str,
        *,
        repository: str,
        what: str,
        accept: Sequence[int],
        push: bool = False,
        headers: Mapping[str, str] | None = None,
        body: bytes | IO[bytes] | None = None,
        silence: float | None = None,
    ) -> Iterator[requests.Response]:
        """One request, its challenge answered; the body of the response is not read yet.

        `path` begins with a slash, or is an address that the registry named. `body` is bytes or a file opened for
        reading at its start. `silence` replaces the policy's. Raises `TransientError` for what may pass, else a
        `RegistryError`.
        """
        scope = f"repository:{repository}:pull{',push' if push else ''}"
        address = path if "://" in path else self._base + path
        limits = (self.policy.connect, silence or self.policy.silence)
        with self._translated(what, limits[1]), contextlib.ExitStack() as stack:

            def send() -> requests.Response:
                return stack.enter_context(self._send(method, address, scope, headers, body=body, limits=limits))

            response = send()
            challenged = response.status_code == 401 and self._is_ours(response.url)
            if challenged and self._answer(response, repository, scope):
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
                response = send()
            self._check(response, accept, what)
            yield response

    def _is_ours(self, address: str) -> bool:
        """Whether an address belongs to the registry that was asked."""
        return _origin(address) == _origin(self._base)

    def _send(
        self,
        method: str,
        address: str,
        scope: str,
        headers: Mapping[str, str] | None,
        *,
        body: bytes | IO[bytes] | None,
        limits: tuple[float, float],
    ) -> requests.Response:
        """Send, and follow redirects of a read. Credentials go to the registry's own address alone."""
        for _ in range(_REDIRECTS + 1):
            self._refuse_unsafe(address)
            sent = dict(headers or {})
            if self._is_ours(address) and scope in self._answers:
                sent["Authorization"] = self._answers[scope]
            response = self._session.request(
                method, address, headers=sent, data=body, stream=True, timeout=limits, allow_redirects=False,
                proxies=self._proxies(address),
            )  # fmt: skip
            self._session.cookies.clear()
            place = response.headers.get("Location", "")
            if method not in ("GET", "HEAD") or response.status_code not in (301, 302, 303, 307, 308) or not place:
                return response
            address = joined(response, place)
            response.close()
        raise InvalidResponse(f"{self.registry} redirects in a circle")

    def _proxies(self, address: str) -> dict[str, str]:
        """Proxies of the environment, never towards the loopback."""
        loopback = is_loopback(urlsplit(address).netloc)
        return {} if loopback else dict(requests.utils.get_environ_proxies(address))

    def _refuse_unsafe(self, address: str) -> None:
        """Raise `InvalidResponse` for an address that the registry named and that is neither TLS nor the loopback."""
        origin = _origin(address)
        safe = origin is not None and (origin[0] == "https" or (self._plain and is_loopback(origin[1])))
        if not safe:
            raise InvalidResponse(f"{self.registry} leads to {_place(address)}, which is not encrypted or no address")

    def _answer(self, response: requests.Response, repository: str, scope: str) -> bool:
        """Answer a challenge; False where the registry sends none, or wants again what it was given."""
        challenges = {
            one.scheme: one for one in reversed(Challenge.parse(response.headers.get("WWW-Authenticate", "")))
        }
        if not challenges:
            return False
        login = self._credentials.login(self.registry, repository)
        bearer = challenges.get("bearer")
        if bearer is not None and "realm" in bearer.parameters:
            new = "Bearer " + self._token(bearer, login, scope)
        elif "basic" in challenges:
            if login is None:
                raise Unauthorized(
                    f"{self.registry} wants a password and none is known for it",
                    hint=f"`docker login {self.registry}`; credentials are read from Docker's config.json",
                )
            new = _basic(login)
        else:
            kinds = printable(", ".join(challenges), 80)
            raise InvalidResponse(f"{self.registry} wants authentication of an unknown kind: {kinds}")
        self._answers[scope] = new
        return response.request.headers.get("Authorization") != new

    def _token(self, challenge: Challenge, login: Login | None, scope: str) -> str:
        """A token from the server that the registry names. It is asked once, there, and no redirect is followed."""
        realm = challenge.parameters["realm"]
        origin = _origin(realm)
        loopback = origin is not None and is_loopback(origin[1]) and is_loopback(api_host(self.registry))
        if origin is None or (origin[0] != "https" and not loopback):
            raise InvalidResponse(
                f"{self.registry} wants passwords to be sent to {_place(realm)}, which is not encrypted or no address"
            )
        asked = {"service": challenge.parameters.get("service", ""), "scope": scope}
        headers, form, method = {}, None, "GET"
        if login is not None and login.identity_token:  # OAuth 2, as Docker's token servers take it
            grant = {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": AGENT}
            method, form = "POST", {**grant, **asked}
        elif login is not None:
            headers = {"Authorization": _basic(login)}
        with self._session.request(
            method, realm, params=asked if form is None else None, data=form, headers=headers, stream=True,
            timeout=(self.policy.connect, self.policy.silence), allow_redirects=False, proxies=self._proxies(realm),
        ) as response:  # fmt: skip
            if 300 <= response.status_code < 400:
                raise InvalidResponse(f"{_place(realm)} redirects, and credentials are not sent on")
            self._check(response, (200,), f"a token for {scope}", server=_place(realm))
            try:
                value = json.loads(read(response, _TOKEN_LIMIT, self.policy))
                token = str(value.get("token") or value["access_token"])
            except (ValueError, KeyError, AttributeError, RecursionError, TypeError) as error:
                raise InvalidResponse(f"{_place(realm)} answered no token") from error
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise InvalidResponse(f"{_place(realm)} answered no token")
        return token

    def _check(self, response: requests.Response, accept: Sequence[int], what: str, server: str = "") -> None:
        """Return when the status is among `accept`; else raise `TransientError`, or the error of the cause."""
        status = response.status_code
        if status in accept:
            return
        server = server or (self.registry if self._is_ours(response.url) else _place(response.url))
        error = refusal(status, _words(response, self.policy), what, server)
        if status in _TRANSIENT:
            raise TransientError(error, _retry_after(response))
        raise error

    @contextlib.contextmanager
    def _translated(self, what: str, silence: float) -> Iterator[None]:
        """Name each failure of the connection; also while a response's body is read."""
        host = self.registry
        again = "does the registry run, and is the name right? Run it again: it goes on"
        try:
            yield
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            if "WRONG_VERSION_NUMBER" in str(error):
                raise RegistryError(
                    f"{what}: {host} does not speak TLS",
                    hint="without TLS only the loopback is spoken to: put TLS before the registry",
                ) from error
            raise RegistryError(
                f"{what}: the certificate of {host} is not trusted: {_reason(error)}",
                hint=f"put its authority into /etc/docker/certs.d/{host}/ca.crt, or name it in SSL_CERT_FILE",
            ) from error
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            message = f"{what}: {host} said nothing for {silence:.0f} s"
            raise TransientError(RegistryError(message, hint="is it overloaded? Run it again")) from error
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader) as error:
            raise InvalidResponse(f"{what}: {host} leads to no valid address", hint=f"is {host} a registry?") from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            message = f"{what}: no connection to {host}, or it was dropped: {_reason(error)}"
            raise TransientError(RegistryError(message, hint=again)) from error


def _origin(address: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None for what is no plain http or https address, one with a user in it included."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    if not parts.hostname or not port or "@" in parts.netloc or "\\" in address:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, host.lower(), port


def _place(address: str) -> str:
    """The host of an address, which may carry secrets elsewhere."""
    try:
        return printable(urlsplit(address).netloc.rpartition("@")[2] or address.partition("?")[0], 80)
    except ValueError:
        return "an address that cannot be read"


def joined(response: requests.Response, place: str) -> str:
    """An address that a registry names, which may be relative to what was asked; raise `InvalidResponse`."""
    try:
        return urljoin(response.url, place)
    except ValueError as error:
        raise InvalidResponse(f"{printable(place, 80)}, which the registry names, is no address") from error


def _words(response: requests.Response, policy: RetryPolicy) -> str:
    """The registry's own words, as one printable line; empty where it has none."""
    try:
        errors = json.loads(read(response, _ERROR_LIMIT, policy, grace=min(5.0, policy.silence)))["errors"]
        words = [" ".join(str(e.get(k)) for k in ("code", "message", "detail") if e.get(k)) for e in errors]
    except Exception:  # noqa: BLE001 - whatever an error page is made of, it is not worth another error
        return ""
    return printable("; ".join(words), 300)


def _retry_after(response: requests.Response) -> float | None:
    from urllib3.exceptions import InvalidHeader

    value = response.headers.get("Retry-After")
    try:
        return urllib3.Retry().parse_retry_after(value) if value else None
    except (InvalidHeader, ValueError, OverflowError):
        return None


def blocks(response: requests.Response, limit: int | None, policy: RetryPolicy, grace: float = 0) -> Iterator[bytes]:
    """The body in blocks. Raises `InvalidResponse` above `limit` bytes, `TransientError` when less comes than was
    announced, `RegistryError` when it comes too slowly.
    """
    began, size, grace = time.monotonic(), 0, grace or policy.silence
    # read1: what has come, however little, so that the clock is looked at while a registry sends byte by byte
    while block := response.raw.read1(_BLOCK, decode_content=False):
        size += len(block)
        if limit is not None and size > limit:
            raise InvalidResponse(f"the response exceeds the size limit of {limit:,} bytes")
        if time.monotonic() - began > grace + size / _SLOWEST:
            raise RegistryError("the registry sends less than 10 kB a second", hint="run it again later")
        yield block
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and "Content-Encoding" not in response.headers and size != int(announced):
        raise TransientError(InvalidResponse(f"{size} of {announced} bytes came", hint="run it again"))


def read(response: requests.Response, limit: int, policy: RetryPolicy, grace: float = 0) -> bytes:
    """The whole body, in memory; raises as `blocks` does."""
    return b"".join(blocks(response, limit, policy, grace))


def _reason(error: BaseException) -> str:
    """The innermost reason of an error of requests, as one printable line without addresses and their secrets."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or (seen.args[0] if seen.args else None)
        if not isinstance(inner, BaseException):
            inner = seen.__cause__  # urllib3 keeps what the socket said there, and the rest of its text has addresses
        if inner is None:
            break
        seen = inner
    if isinstance(seen, ssl.SSLCertVerificationError):
        return printable(seen.verify_message, 120)
    if isinstance(seen, OSError) and seen.strerror:
        return printable(seen.strerror, 120)
    return type(seen).__name__
