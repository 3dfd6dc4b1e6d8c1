"""Who we are to a registry: read from where Docker keeps it, never from an argument, and never printed.

In this order, the first that knows the host:

    $DOCKER_AUTH_CONFIG              the JSON of a config.json, as CI systems keep it in a secret
    $REGISTRY_AUTH_FILE              a file of that shape, as podman and skopeo read it
    $DOCKER_CONFIG or ~/.docker      config.json: credHelpers, credsStore, auths

A helper is `docker-credential-<name>`, asked as Docker asks it: `get`, the host on stdin, JSON on stdout.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cache.finding import shown
from pipeline.contract.files import write_json
from pipeline.daemon import config_folder
from pipeline.run import ProcessFailed, ProgramMissing, run

from .errors import CredentialsUnreadable

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
    """Configurations in the order in which they are asked; each is the content of a config.json and where it lies."""

    configs: tuple[tuple[str, Mapping[str, Any]], ...] = field(repr=False, default=())

    @staticmethod
    def load(env: Mapping[str, str] | None = None) -> Credentials:
        """Read what the environment names; a missing file is none. Raises `CredentialsUnreadable`."""
        env = os.environ if env is None else env
        found: list[tuple[str, Mapping[str, Any]]] = []
        if env.get("DOCKER_AUTH_CONFIG"):
            found.append(("DOCKER_AUTH_CONFIG", _object(env["DOCKER_AUTH_CONFIG"], "DOCKER_AUTH_CONFIG")))
        files = [Path(env["REGISTRY_AUTH_FILE"])] if env.get("REGISTRY_AUTH_FILE") else []
        for path in [*files, config_folder(env) / "config.json"]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append((str(path), _object(_text(path), str(path))))
        return Credentials(tuple(found))

    def login(self, host: str) -> Login | None:
        """The login for a registry's host (`name[:port]`), None where nothing knows one.

        Raises `CredentialsUnreadable` where a helper fails, or an entry has another shape than Docker's.
        """
        for where, config in self.configs:
            found = _from_config(config, host, where)
            if found is not None:
                return found
        return None


@contextlib.contextmanager
def docker_config(logins: Mapping[str, Login], *, parent: Path | None = None) -> Iterator[Path]:
    """A folder that holds a config.json with these logins by host, for programs that read `$DOCKER_CONFIG`.

    For this user alone (0700), below `parent` or the temporary folder, and gone on leaving. Buildx, cosign, skopeo
    and oras read it, so that a password reaches them by no argument.
    """
    with tempfile.TemporaryDirectory(prefix="login-", dir=parent) as folder:
        auths = {}
        for host, login in logins.items():
            pair = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
            token = {"identitytoken": login.identity_token} if login.identity_token else {}
            auths[host] = {"auth": pair, **token}
        write_json(Path(folder) / "config.json", {"auths": auths}, mode=0o600)
        yield Path(folder)


def docker_config_for(hosts: Sequence[str], credentials: Credentials) -> contextlib.AbstractContextManager[Path]:
    """As `docker_config`, with what `credentials` know of these hosts."""
    known = {host: login for host in hosts if (login := credentials.login(host)) is not None}
    return docker_config(known)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (PermissionError, UnicodeDecodeError, IsADirectoryError) as error:
        raise CredentialsUnreadable(f"{path} cannot be read", hint="mend it, or `docker login` again") from error


def _object(text: str, where: str) -> dict[str, Any]:
    """Read JSON; what it holds is never shown, since it may be a password."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CredentialsUnreadable(f"{where} is not a JSON object", hint="mend it, or `docker login` again")
    return value


def _from_config(config: Mapping[str, Any], host: str, where: str) -> Login | None:
    helpers = config.get("credHelpers")
    named = helpers.get(host) if isinstance(helpers, dict) else None
    helper = named or config.get("credsStore")
    if helper:
        found = _from_helper(str(helper), host)
        if found is not None or named:
            return found
    auths = config.get("auths")
    for address, entry in auths.items() if isinstance(auths, dict) else ():
        if _host_of(str(address)) == host and isinstance(entry, dict):
            return _from_entry(entry, host, where)
    return None


def _host_of(address: str) -> str:
    """The host in a key of `auths`, which may be an address such as `https://host/v1/`."""
    return re.sub(r"^https?://", "", address).partition("/")[0]


def _from_entry(entry: Mapping[str, Any], host: str, where: str) -> Login | None:
    token = str(entry.get("identitytoken") or "")
    if entry.get("auth"):
        try:
            user, colon, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = user = password = ""
        if not colon:
            raise CredentialsUnreadable(
                f"{where}: auth of {shown(host)} is not user:password in base64", hint=f"`docker login {shown(host)}`"
            )
        return Login(user, password.rstrip("\0"), token)
    if entry.get("username") or token:
        return Login(str(entry.get("username") or ""), str(entry.get("password") or ""), token)
    return None  # an empty entry says that a helper knows


def _from_helper(name: str, host: str) -> Login | None:
    if not _HELPER.fullmatch(name):
        raise CredentialsUnreadable(f"{shown(name)} is not the name of a credential helper")
    program = f"docker-credential-{name}"
    hint = f"`echo {shown(host)} | {program} get` shows what is wrong"
    with tempfile.NamedTemporaryFile("w", prefix="host-") as asked:  # run() takes its child's stdin from a file
        asked.write(host)
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
            raise CredentialsUnreadable(f"{program}, which config.json names, is not on PATH", hint=hint) from error
        except ProcessFailed as error:
            raise CredentialsUnreadable(f"{program} failed", hint=hint) from error
    if done.status != 0:
        if "credentials not found" in done.stdout:
            return None
        raise CredentialsUnreadable(f"{program} failed", hint=hint)
    value = _object(done.stdout, program)
    user, secret = str(value.get("Username") or ""), str(value.get("Secret") or "")
    return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)
