"""What is started, and what was seen of it. Standard library only: it runs in containers too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PORT = "{port}"  # stands in the command for a port that is free at each start


@dataclass(frozen=True)
class Spec:
    """What to start, and what to ask of it.

    `requests` are tried in order; each is a list of (path without a slash in front, body) of which one must answer.
    `ready` and `answer` are the timeouts of a start and of a request, in seconds. `most` starts are made at most, fewer
    when one writes no new file of a known kind.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    requests: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = ()
    token: str = ""  # a bearer token, where the server wants one
    ready: float = 1800.0
    answer: float = 300.0
    most: int = 1

    @property
    def timeout(self) -> float:
        """Of all its starts, in seconds."""
        return self.most * (self.ready + self.answer * max(1, len(self.requests)))

    @staticmethod
    def read(value: Mapping[str, Any]) -> Spec:
        """From JSON values."""
        requests = tuple(tuple((path, body) for path, body in ways) for ways in value["requests"])
        return Spec(**{**value, "command": tuple(value["command"]), "requests": requests})


@dataclass
class Start:
    """One start. Times are seconds since the server's process was started.

    `outcome` is `ready`, `died`, `timeout`, or `refused` (it was ready and refused a request). `new` and `changed` are
    files with their sizes; `compilers` counts processes by name.
    """

    outcome: str = "died"
    message: str = ""
    ready: float = 0.0
    answers: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    new: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    compilers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def read(value: Mapping[str, Any]) -> Start:
        """From JSON values."""
        return Start(**{**value, "lines": [(float(at), str(text)) for at, text in value["lines"]]})

    def tail(self, lines: int = 40) -> tuple[str, ...]:
        """The last lines that the server printed."""
        return tuple(text for _, text in self.lines[-lines:])
