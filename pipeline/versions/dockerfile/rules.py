"""Whose rules hold: the version of BuildKit's Dockerfile frontend, and the one error that it has for a word."""

from __future__ import annotations

import re
from typing import NamedTuple


class Frontend(NamedTuple):
    """The version of BuildKit's Dockerfile frontend, as in `# syntax=docker/dockerfile:1.7`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


ENGINE = Frontend(1, 7)  # what Docker Engine 26.1 has built in
NEWEST = Frontend(1, 27)


class BadWord(ValueError):
    """BuildKit refuses this word."""


def named_by(syntax: str) -> Frontend:
    """The frontend that a file's `# syntax=` line asks for; without one, or for another image, the engine's own."""
    found = re.fullmatch(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?::([\w.]+)(?:-labs)?)?(?:@.*)?", syntax)
    if found is None:
        return ENGINE
    numbers = re.match(r"(\d+)\.(\d+)", found[1] or "")
    return Frontend(int(numbers[1]), int(numbers[2])) if numbers else NEWEST
