"""What a registry's refusals mean: HTTP status and the codes of the distribution specification, as our errors."""

from __future__ import annotations

import json
from collections.abc import Sequence

import requests

from pipeline.cache.finding import shown
from pipeline.contract.errors import PublishError

from .bodies import read
from .errors import (
    AnswerInvalid,
    DigestMismatch,
    NotInRegistry,
    Refused,
    RegistryBroken,
    RegistryFull,
    TooManyRequests,
    Unauthorized,
)
from .patience import Passing

_MOST = 65_536  # bytes of an error's body that are looked at
_LONGEST = 5.0  # seconds that its words are waited for while they trickle in
_ROOM = (
    "no space left",
    "quota",
    "insufficient storage",
    "storage limit",
    "out of space",
    "'err': 28}",
    "'err': 122}",
)  # as docker-registry 2.8 says ENOSPC and EDQUOT
PASSING = frozenset({429, 500, 502, 503, 504})


def said(response: requests.Response) -> str:
    """The registry's own words, as one printable line; empty where it has none."""
    try:
        errors = json.loads(read(response, _MOST, _LONGEST))["errors"]
        words = [" ".join(str(e.get(k)) for k in ("code", "message", "detail") if e.get(k)) for e in errors]
    except Exception:  # noqa: BLE001 - whatever an error page is made of, it is not worth another error
        return ""
    return shown("; ".join(words), 300)


def judge(response: requests.Response, accept: Sequence[int], what: str, host: str) -> None:
    """Return when the status is among `accept`.

    Raises `Passing` for what may pass (500, 502, 503, 504, 429), else the `PublishError` of the cause. `what` names
    what was asked, without secrets.
    """
    if response.status_code in accept:
        return
    cause = _cause(response.status_code, said(response), what, host)
    if response.status_code in PASSING:
        raise Passing(cause, response.raw)
    raise cause


def _cause(status: int, words: str, what: str, host: str) -> PublishError:
    low = words.lower()
    rules: tuple[tuple[bool, type[PublishError], str], ...] = (
        (
            status in (413, 507) or any(sign in low for sign in _ROOM),
            RegistryFull,
            "make room in the registry or raise its quota, then run it again: it goes on",
        ),
        (status == 401, Unauthorized, f"`docker login {host}`; credentials are read from Docker's config.json"),
        (status == 403, Refused, f"check this user's rights in the registry, or `docker login {host}` as another"),
        (status == 404, NotInRegistry, "check the name; some registries want a repository to be made first"),
        (status == 429, TooManyRequests, "run it again later: what is there is not pushed again"),
        ("digest_invalid" in low, DigestMismatch, "something on the way changes what is sent: a proxy?"),
        (status >= 500, RegistryBroken, "look at the registry's own log, then run it again: it goes on"),
        (400 <= status < 500, Refused, "the registry does not take this; its log says why"),
    )
    chosen = ((kind, hint) for holds, kind, hint in rules if holds)
    kind, hint = next(chosen, (AnswerInvalid, f"is {host} a registry?"))
    return kind(f"{what}: {host} answered {status}" + (f" ({words})" if words else ""), hint=hint)
