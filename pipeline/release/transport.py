"""HTTP to one registry: trust, authentication, timeouts, and each failure as one of our errors.

Nothing is retried here: a failure that may pass leaves as `Passing`, and whoever knows how to begin the whole operation
again hands it to `Patience.insist`.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import IO
from urllib.parse import urljoin

import requests
import requests.adapters
import urllib3

from pipeline.cache.finding import shown

from . import auth
from .answers import judge
from .credentials import Credentials
from .errors import AnswerInvalid, RegistrySilent, TlsFailed
from .patience import Passing, Patience
from .tls import is_plain, trust

_AGENT = "tuned-image-pipeline"


class _OwnTrust(requests.adapters.HTTPAdapter):
    """An adapter whose certificates are checked by our own context, not by the bundle that requests carries."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(max_retries=0)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **more: object) -> None:
        """Give the pool our context."""
        super().init_poolmanager(connections, maxsize, block, **{**more, "ssl_context": self._context})

    def proxy_manager_for(self, proxy: str, **more: object) -> urllib3.ProxyManager:
        """Give the pool behind a proxy our context."""
        made: urllib3.ProxyManager = super().proxy_manager_for(proxy, **{**more, "ssl_context": self._context})
        return made

    def cert_verify(self, conn: object, url: object, verify: object, cert: object) -> None:
        """Leave the connection's context alone."""


class _Silent(requests.auth.AuthBase):
    """Keeps requests from looking for a password in ~/.netrc: where ours come from is written in `credentials`."""

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        return r


class Transport:
    """Requests to one registry, `host` being `name[:port]`; plain HTTP on the loopback unless certs.d names it."""

    def __init__(self, host: str, credentials: Credentials, patience: Patience) -> None:
        self.host = host
        self.patience = patience
        self._credentials = credentials
        self._plain = is_plain(host)
        self._base = f"{'http' if self._plain else 'https'}://{host}"
        self._session = requests.Session()
        self._session.auth = _Silent()
        self._session.headers["User-Agent"] = _AGENT
        self._session.headers["Accept-Encoding"] = "identity"  # digests are of bytes as they are
        self._session.trust_env = not self._plain  # proxies of the environment, never towards the loopback
        self._session.mount("https://", _OwnTrust(trust(host)))
        self._authorizations: dict[str, str] = {}  # by scope

    def close(self) -> None:
        """Close all connections."""
        self._session.close()

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        path: str,
        *,
        scope: str,
        what: str,
        accept: Sequence[int],
        headers: Mapping[str, str] | None = None,
        body: bytes | IO[bytes] | None = None,
    ) -> Iterator[requests.Response]:
        """One request, its challenge answered; the body of the response is not read yet.

        `path` begins with a slash, or is a whole address of this registry. `body` is bytes or a file opened for
        reading at its start. Raises `Passing` for what may pass, else the error of the cause.
        """
        address = path if "://" in path else self._base + path
        with self._named(what), contextlib.ExitStack() as stack:
            response = stack.enter_context(self._send(method, address, scope, headers, body))
            if response.status_code == 401 and self._authorize(response, scope):
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
                response = stack.enter_context(self._send(method, address, scope, headers, body))
            judge(response, accept, what, self.host)
            yield response

    def _send(
        self, method: str, address: str, scope: str, headers: Mapping[str, str] | None, body: bytes | IO[bytes] | None
    ) -> requests.Response:
        sent = dict(headers or {})
        ours = address == self._base or address.startswith(self._base + "/")
        if ours and scope in self._authorizations:
            sent["Authorization"] = self._authorizations[scope]
        return self._session.request(
            method,
            address,
            headers=sent,
            data=body,
            stream=True,
            timeout=self._timeout,
            allow_redirects=method != "PUT",
        )

    @property
    def _timeout(self) -> tuple[float, float]:
        return self.patience.connect, self.patience.silence

    def _authorize(self, response: requests.Response, scope: str) -> bool:
        """Answer a challenge; False where the registry sends none, or wants again what it was given."""
        header = response.headers.get("WWW-Authenticate", "")
        if not header:
            return False
        asker = auth.Asker(self._session, self.host, self._credentials.login(self.host), self._timeout)
        new = asker.answer(auth.Challenge.parse(header), scope)
        again = self._authorizations.get(scope) == new
        self._authorizations[scope] = new
        return not again

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Name each failure of the connection; also while a response's body is read."""
        host = self.host
        try:
            yield
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            if "WRONG_VERSION_NUMBER" in str(error):
                raise TlsFailed(
                    f"{what}: {host} does not speak TLS",
                    hint="without TLS only the loopback is spoken to: put TLS before the registry",
                ) from error
            raise TlsFailed(
                f"{what}: the certificate of {host} is not trusted: {_reason(error)}",
                hint=f"put its authority into /etc/docker/certs.d/{host}/ca.crt, or name it in SSL_CERT_FILE",
            ) from error
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            seconds = self.patience.silence
            raise Passing(
                RegistrySilent(
                    f"{what}: {host} said nothing for {seconds:.0f} s", hint="is it overloaded? Run it again"
                )
            ) from error
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader) as error:
            raise AnswerInvalid(f"{what}: {host} leads to no valid address", hint=f"is {host} a registry?") from error
        except requests.exceptions.TooManyRedirects as error:
            raise AnswerInvalid(f"{what}: {host} redirects in a circle") from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
            raise Passing(
                RegistrySilent(
                    f"{what}: no connection to {host}, or it was dropped: {_reason(error)}",
                    hint="does the registry run, and is the name right? Run it again: it goes on",
                )
            ) from error


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
        return shown(seen.verify_message, 120)
    if isinstance(seen, OSError) and seen.strerror:
        return shown(seen.strerror, 120)
    return type(seen).__name__


def joined(response: requests.Response, place: str) -> str:
    """An address that a registry names, which may be relative to what was asked; raise `AnswerInvalid`."""
    try:
        return urljoin(response.url, place)
    except ValueError as error:
        raise AnswerInvalid(f"{shown(place, 80)}, which the registry names, is no address") from error


def scope_of(repository: str, *, push: bool = False) -> str:
    """What a token must be good for, as token servers spell it."""
    return f"repository:{repository}:pull{',push' if push else ''}"
