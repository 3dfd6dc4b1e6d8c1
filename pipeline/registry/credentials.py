"""Logins and certificates, from where Docker and its relatives keep them; none is ever stored or asked for here.

    $DOCKER_AUTH_CONFIG        the content of a config.json
    $REGISTRY_AUTH_FILE        as skopeo and podman read it
    $DOCKER_CONFIG/config.json (~/.docker/config.json): credHelpers, credsStore, auths

The first that knows the registry wins. A login for `quay.io/team` serves that namespace alone, and the longest match
wins. Docker Hub's login lies under `https://index.docker.io/v1/`.

    /etc/docker/certs.d/<host>/*.crt           authorities for this registry alone, as dockerd reads them
    /etc/docker/certs.d/<host>/*.cert, *.key   what the registry is shown, in pairs of one name

`$SSL_CERT_FILE` and `$SSL_CERT_DIR` replace the system's store (OpenSSL does that by itself);
`$REQUESTS_CA_BUNDLE` is trusted as well.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_json
from pipeline.contract.strictjson import FileMissing, Unreadable, read_bytes
from pipeline.contract.text import shown
from pipeline.home import home
from pipeline.run import ProcessFailed, ProgramMissing, run

from .reference import DOCKER_HUB, api_host, is_loopback

HUB_KEY = "https://index.docker.io/v1/"
_CERTS = (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d"))
_HELPER = re.compile(r"[A-Za-z0-9_.-]+")
_HELPER_TIMEOUT = 60.0  # seconds: some ask a cloud
_TOKEN_USER = "<token>"  # what helpers and Docker write for an identity token instead of a user's name  # noqa: S105


@dataclass(frozen=True)
class Login:
    """A user and a password, or an identity token alone. Its `repr` shows neither secret."""

    username: str
    password: str = field(repr=False, default="")
    identity_token: str = field(repr=False, default="")


@dataclass(frozen=True)
class Credentials:
    """Configurations in the order in which they are asked; each is where it lies and the content of a config.json."""

    configs: tuple[tuple[str, Mapping[str, Any]], ...] = field(repr=False, default=())

    @staticmethod
    def load(env: Mapping[str, str] | None = None) -> Credentials:
        """Read what the environment names; a missing file is none. Raises `UsageError`."""
        env = os.environ if env is None else env
        found: list[tuple[str, Mapping[str, Any]]] = []
        if env.get("DOCKER_AUTH_CONFIG"):
            found.append(("DOCKER_AUTH_CONFIG", _object(env["DOCKER_AUTH_CONFIG"], "DOCKER_AUTH_CONFIG")))
        folder = Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME") or home()) / ".docker")
        files = [Path(env["REGISTRY_AUTH_FILE"])] if env.get("REGISTRY_AUTH_FILE") else []
        for path in [*files, folder / "config.json"]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append((str(path), _object(_text(path), str(path))))
        return Credentials(tuple(found))

    def login(self, registry: str, repository: str = "") -> Login | None:
        """The login for a repository of a registry, None where nothing knows one.

        Raises `UsageError` where a helper fails, or an entry has another shape than Docker's.
        """
        registry = _canonical(registry)
        for where, config in self.configs:
            found = _from_config(config, registry, repository, where)
            if found is not None:
                return found
        return None


@contextlib.contextmanager
def docker_config(registry: str, login: Login | None) -> Iterator[Path]:
    """A folder with a config.json that holds this login alone, for a program that reads `$DOCKER_CONFIG`.

    For this user alone (0700, the file 0600), and removed on leaving: so that a password is on no command line.
    """
    with tempfile.TemporaryDirectory(prefix="login-") as folder:
        auths = {}
        if login is not None:
            pair = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
            token = {"identitytoken": login.identity_token} if login.identity_token else {}
            auths[HUB_KEY if _canonical(registry) == DOCKER_HUB else registry] = {"auth": pair, **token}
        write_json(Path(folder) / "config.json", {"auths": auths}, mode=0o600)
        yield Path(folder)


def _text(path: Path) -> str:
    try:
        return read_bytes(path, pipe=True).decode()
    except (FileMissing, Unreadable, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise error.__cause__ from None
        raise UsageError(f"{path} cannot be read", hint="repair it, or `docker login` again") from error


def _object(text: str, where: str) -> dict[str, Any]:
    """Read JSON; what it holds is never shown, since it may be a password."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object", hint="repair it, or `docker login` again")
    return value


def _canonical(registry: str) -> str:
    """One name for each registry: Docker Hub has several."""
    return DOCKER_HUB if api_host(registry) == api_host(DOCKER_HUB) else registry


def _from_config(config: Mapping[str, Any], registry: str, repository: str, where: str) -> Login | None:
    server = HUB_KEY if registry == DOCKER_HUB else registry  # the name by which Docker asks helpers
    helpers = config.get("credHelpers")
    named = helpers.get(server) or helpers.get(registry) if isinstance(helpers, dict) else None
    helper = named or config.get("credsStore")
    if helper:
        found = _from_helper(str(helper), server)
        if found is not None or named:
            return found
    listed = config.get("auths")
    known: dict[str, Mapping[str, Any]] = {}
    for address, entry in listed.items() if isinstance(listed, dict) else ():
        if isinstance(entry, dict) and entry:  # an empty entry says that a helper knows
            known.setdefault(_scope_of(str(address)), entry)
    parts = [registry, *(part for part in repository.split("/") if part)]
    for length in range(len(parts), 0, -1):
        scope = "/".join(parts[:length])
        if scope in known:
            return _from_entry(known[scope], scope, where)
    return None


def _scope_of(address: str) -> str:
    """What a key of `auths` is for: `host` or `host/namespace`. An address such as `https://host/v1/` is a host."""
    bare = re.sub(r"^https?://", "", address)
    host, _, path = bare.partition("/")
    host = _canonical(host)
    path = path.strip("/")
    return host if bare != address or path in ("", "v1", "v2") else f"{host}/{path}"


def _from_entry(entry: Mapping[str, Any], scope: str, where: str) -> Login | None:
    token = str(entry.get("identitytoken") or "")
    if entry.get("auth"):
        try:
            user, colon, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            colon = user = password = ""
        if not colon:
            raise UsageError(
                f"{where}: auth of {shown(scope)} is not user:password in base64",
                hint=f"`docker login {shown(scope.partition('/')[0])}`",
            )
        return Login(user, password.rstrip("\0"), token)
    if entry.get("username") or token:
        return Login(str(entry.get("username") or ""), str(entry.get("password") or ""), token)
    return None


def _from_helper(name: str, server: str) -> Login | None:
    if not _HELPER.fullmatch(name):
        raise UsageError(f"{shown(name)} is not the name of a credential helper")
    program = f"docker-credential-{name}"
    hint = f"`echo {shown(server)} | {program} get` shows what is wrong"
    with tempfile.NamedTemporaryFile("w", prefix="server-") as asked:  # run() takes its child's stdin from a file
        asked.write(server)
        asked.flush()
        try:
            # A cloud's helper reads its own variables, which the allow-list of run() does not know: it gets them all.
            done = run(
                [program, "get"],
                capture=True,
                stdin=Path(asked.name),
                env=dict(os.environ),
                timeout=_HELPER_TIMEOUT,
                accept=(0, 1),
            )
        except ProgramMissing as error:
            raise UsageError(f"{program}, which config.json names, is not on PATH", hint=hint) from error
        except ProcessFailed as error:
            raise UsageError(f"{program} failed", hint=hint) from error
    if done.status != 0:
        if "credentials not found" in done.stdout:
            return None
        raise UsageError(f"{program} failed", hint=hint)
    value = _object(done.stdout, program)
    user, secret = str(value.get("Username") or ""), str(value.get("Secret") or "")
    return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)


def authorities(registry: str) -> tuple[Path, ...]:
    """Files of authorities that are trusted beside the system's."""
    return tuple(path for folder in _certs_folders(registry) for path in sorted(folder.glob("*.crt")))


def client_certificates(registry: str) -> tuple[tuple[Path, Path], ...]:
    """Certificate and key that the registry is shown, in pairs of one name."""
    found = (path for folder in _certs_folders(registry) for path in sorted(folder.glob("*.cert")))
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
        raise UsageError(f"{place} cannot be read as certificates: {error}", hint="PEM is expected") from error
    if not context.cert_store_stats()["x509_ca"] and not os.environ.get("SSL_CERT_FILE"):
        import certifi  # a system without ca-certificates: the authorities that requests would use

        context.load_verify_locations(certifi.where())
    return context


def _certs_folders(registry: str) -> tuple[Path, ...]:
    """The certs.d folders that exist for a registry, as dockerd and podman read them; a rootless Docker's too."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "docker" / "certs.d"
    return tuple(place / registry for place in (*_CERTS, own) if (place / registry).is_dir())
