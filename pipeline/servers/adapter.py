"""What a server is to this package: its command, its directories, its log, and what enters its hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

from .starts import PORT
from .words import Words

Body = Mapping[str, Any]
Ways = tuple[tuple[str, Body], ...]  # (path without its slash, body) of which one must answer


@dataclass(frozen=True)
class Phase:
    """A part of a start. It ends with the first line that `ends` matches, or lasts the seconds that `took` finds."""

    name: str
    ends: str = ""
    took: str = ""


@dataclass(frozen=True)
class Event:
    """What a line of the log says of a kind of cache: `hit` or `made`."""

    kind: str
    says: str
    pattern: str


class Adapter(Protocol):
    """One server."""

    name: str
    serve: tuple[str, ...]  # its serve command, which its arguments follow
    health: str
    phases: Sequence[Phase]
    events: Sequence[Event]
    known: str  # versions whose start and hashes were read, as a regular expression
    facts: tuple[str, ...]

    def command(self, words: Words) -> tuple[str, ...]:
        """Its serve command with these words, our address and dummy weights."""

    def environment(self, root: str) -> dict[str, str]:
        """The variables that place its caches below `root`, and pin what would change its hashes."""

    def requests(self, words: Words) -> tuple[Ways, ...]:
        """One prefill, one decode, one sampled request."""

    def token(self, words: Words) -> str:
        """The bearer token that it wants."""

    def enters(self, variable: str, hashed: Sequence[str]) -> bool:
        """Whether a variable enters its hashes; `hashed` are those that the server itself named, if it did."""

    def ignored(self) -> frozenset[str]:
        """Options that change nothing of what is cached."""


PROMPT = (1, 5, 9, 13)
# torch asks for the user's name, and a user without one (`--user 12345`) ends the start (seen with torch 2.11).
NAMELESS = {"USER": "server"}
ADDRESS = ("--host", "127.0.0.1", "--port", PORT)
# Options that a start for warming up sets itself, with the number of values that each has.
REPLACED = {
    "host": 1, "port": 1, "uds": 1, "load-format": 1, "ssl-keyfile": 1, "ssl-certfile": 1, "ssl-ca-certs": 1,
    "ssl-cert-reqs": 1, "skip-tokenizer-init": 0, "api-key": 1, "admin-api-key": 1,
}  # fmt: skip


def below(root: str, places: Mapping[str, str]) -> dict[str, str]:
    """Variables with the places that they name below a folder; an empty place is the folder itself."""
    return {name: str(PurePosixPath(root, place)) for name, place in places.items()}
