"""Answering a registry's challenge: Basic, or Bearer with a token from the realm that the registry names."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import requests

from pipeline.cache.finding import shown

from .answers import judge
from .bodies import read
from .credentials import Login
from .errors import AnswerInvalid, Unauthorized

_PART = re.compile(r'([A-Za-z_-]+)=(?:"([^"]*)"|([^\s,]+))')
_CLIENT = "tuned-image-pipeline"
_MOST = 1 << 20  # bytes of an answer with a token


@dataclass(frozen=True)
class Challenge:
    """`WWW-Authenticate` in its parts: `basic` or `bearer`, and what follows."""

    scheme: str
    parts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(header: str) -> Challenge:
        """Read the header; unknown schemes are returned as they are."""
        scheme, _, rest = header.strip().partition(" ")
        return Challenge(scheme.lower(), {k.lower(): quoted or plain for k, quoted, plain in _PART.findall(rest)})


def basic(login: Login) -> str:
    """The header's value for a user and a password."""
    return "Basic " + base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


@dataclass(frozen=True)
class Asker:
    """Who answers challenges: our `login` at the registry `host` (None: nobody), `timeout` as requests takes it."""

    session: requests.Session
    host: str
    login: Login | None
    timeout: tuple[float, float]

    def answer(self, challenge: Challenge, scope: str) -> str:
        """The value of `Authorization` that answers a challenge for `scope` (`repository:<name>:pull,push`).

        Raises `Unauthorized` where there is no login and one is needed, or the realm refuses; `AnswerInvalid` where the
        realm is no safe address or answers no token.
        """
        host = self.host
        if challenge.scheme == "basic":
            if self.login is None:
                raise Unauthorized(
                    f"{host} wants a password and none is known for it",
                    hint=f"`docker login {host}`; credentials are read from Docker's config.json",
                )
            return basic(self.login)
        if challenge.scheme != "bearer" or "realm" not in challenge.parts:
            kind = shown(challenge.scheme, 40)
            raise AnswerInvalid(f"{host} wants authentication of a kind that is not known: {kind}")
        return "Bearer " + self._token(challenge, scope)

    def _token(self, challenge: Challenge, scope: str) -> str:
        realm = challenge.parts["realm"]
        try:
            place = urlsplit(realm)
        except ValueError as error:
            raise AnswerInvalid(f"{self.host} names a token server that is no address: {shown(realm, 80)}") from error
        if place.scheme != "https" and not (place.scheme == "http" and _same_loopback(place.hostname or "", self.host)):
            raise AnswerInvalid(f"{self.host} sends passwords to {shown(realm, 80)}, which is not encrypted")
        asked = {"service": challenge.parts.get("service", ""), "scope": scope}
        with self._asked(realm, asked) as response:
            judge(response, (200,), f"a token for {scope}", place.netloc.rpartition("@")[2])
            try:
                value = json.loads(read(response, _MOST, self.timeout[1]))
                return str(value.get("token") or value["access_token"])
            except (ValueError, KeyError, AttributeError) as error:
                raise AnswerInvalid(f"{shown(place.netloc, 80)} answered no token") from error

    def _asked(self, realm: str, asked: Mapping[str, str]) -> requests.Response:
        login = self.login
        if login is not None and login.identity_token:  # OAuth 2, as Docker's token server takes it
            form = {"grant_type": "refresh_token", "refresh_token": login.identity_token, "client_id": _CLIENT, **asked}
            return self.session.post(realm, data=form, timeout=self.timeout, stream=True)
        headers = {"Authorization": basic(login)} if login is not None else {}
        return self.session.get(realm, params=asked, headers=headers, timeout=self.timeout, stream=True)


def _same_loopback(realm_host: str, host: str) -> bool:
    from .reference import is_loopback

    return is_loopback(realm_host) and is_loopback(host)
