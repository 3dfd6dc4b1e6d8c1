"""Which certificates a registry is trusted by: the system's, those of the environment, and Docker's certs.d.

    /etc/docker/certs.d/<host>/*.crt           authorities for this registry alone, as dockerd reads them
    /etc/docker/certs.d/<host>/*.cert, *.key   what we show the registry, in pairs of one name

`$SSL_CERT_FILE` and `$SSL_CERT_DIR` replace the system's store (OpenSSL does that by itself);
`$REQUESTS_CA_BUNDLE` is trusted as well.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from .errors import CertificatesUnreadable
from .reference import is_loopback

PLACES = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))


def folders(host: str) -> tuple[Path, ...]:
    """The certs.d folders that exist for a host; a rootless Docker's is among them."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "docker" / "certs.d"
    return tuple(place / host for place in (*PLACES, own) if (place / host).is_dir())


def is_plain(host: str) -> bool:
    """Whether a registry is spoken to without TLS: on the loopback, as Docker has it, unless certs.d names it."""
    return is_loopback(host) and not any(any(folder.glob("*.crt")) for folder in folders(host))


def trust(host: str) -> ssl.SSLContext:
    """What a registry's certificate is checked with. Raises `CertificatesUnreadable`."""
    context = ssl.create_default_context()
    bundle = os.environ.get("REQUESTS_CA_BUNDLE")
    if bundle:
        _load(context, Path(bundle))
    for folder in folders(host):
        for authority in sorted(folder.glob("*.crt")):
            _load(context, authority)
        for certificate in sorted(folder.glob("*.cert")):
            try:
                context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            except (OSError, ssl.SSLError) as error:
                raise _unreadable(certificate, error) from error
    if not context.cert_store_stats()["x509_ca"] and not os.environ.get("SSL_CERT_FILE"):
        import certifi  # a system without ca-certificates: the authorities that requests would use

        context.load_verify_locations(certifi.where())
    return context


def _load(context: ssl.SSLContext, place: Path) -> None:
    try:
        context.load_verify_locations(capath=place) if place.is_dir() else context.load_verify_locations(place)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(place, error) from error


def _unreadable(place: Path, error: Exception) -> CertificatesUnreadable:
    return CertificatesUnreadable(f"{place} cannot be read as certificates: {error}", hint="PEM is expected")
