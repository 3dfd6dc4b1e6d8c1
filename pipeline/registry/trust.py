"""Which certificates a registry is trusted by, and the HTTP session that is used for it.

    /etc/docker/certs.d/<host>/*.crt           authorities for this registry alone, as dockerd reads them
    /etc/docker/certs.d/<host>/*.cert, *.key   what the registry is shown, in pairs of one name

`$SSL_CERT_FILE` and `$SSL_CERT_DIR` replace the system's store (OpenSSL does that by itself);
`$REQUESTS_CA_BUNDLE` is trusted as well.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import requests
import requests.adapters
import urllib3

from .errors import CredentialsInvalid
from .reference import is_loopback

AGENT = "tuned-image-pipeline"
_CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))


def certs_folders(registry: str) -> tuple[Path, ...]:
    """The certs.d folders that exist for a registry, as dockerd and podman read them; a rootless Docker's too."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "docker" / "certs.d"
    return tuple(place / registry for place in (*_CERTS, own) if (place / registry).is_dir())


def authorities(registry: str) -> tuple[Path, ...]:
    """Files of authorities that are trusted beside the system's."""
    return tuple(path for folder in certs_folders(registry) for path in sorted(folder.glob("*.crt")))


def client_certificates(registry: str) -> tuple[tuple[Path, Path], ...]:
    """Certificate and key that the registry is shown, in pairs of one name."""
    found = (path for folder in certs_folders(registry) for path in sorted(folder.glob("*.cert")))
    return tuple((path, path.with_suffix(".key")) for path in found)


def is_plain(registry: str) -> bool:
    """Whether a registry is spoken to without TLS: on the loopback, as Docker has it, unless certs.d names it."""
    return is_loopback(registry) and not authorities(registry)


def trust(registry: str) -> ssl.SSLContext:
    """What a certificate is checked with; with a `registry`, its own authorities and our certificate for it too."""
    context = ssl.create_default_context()
    bundle = os.environ.get("REQUESTS_CA_BUNDLE", "")
    place = Path(bundle)
    try:
        if bundle:
            context.load_verify_locations(**{"capath" if place.is_dir() else "cafile": str(place)})
        for place in authorities(registry) if registry else ():
            context.load_verify_locations(cafile=str(place))
        for place, key in client_certificates(registry) if registry else ():
            context.load_cert_chain(place, key)
    except (OSError, ssl.SSLError) as error:
        raise CredentialsInvalid(f"{place} cannot be read as certificates: {error}", hint="PEM is expected") from error
    if not context.cert_store_stats()["x509_ca"] and not os.environ.get("SSL_CERT_FILE"):
        import certifi  # a system without ca-certificates: the authorities that requests would use

        context.load_verify_locations(certifi.where())
    return context


class Adapter(requests.adapters.HTTPAdapter):
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


class Session(requests.Session):
    """A session that follows no redirect, reads no ~/.netrc, and keeps no cookie."""

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.headers["User-Agent"] = AGENT
        self.headers["Accept-Encoding"] = "identity"  # digests are of bytes as they are

    def get_redirect_target(self, resp: requests.Response) -> str | None:  # noqa: ARG002
        """None: requests would read the whole body of a redirect before anyone could stop it."""
        return None
