"""Variables in commands: what ENV and a shell's `NAME=value` give them, and a text with what they hold put in."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PAIR = re.compile(r"(?<!\S)([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s\"']*)(?!\S)")
_ASSIGNED = re.compile(
    r"(?:^|[;&|({]|\b(?:then|do|else|export|local|readonly|(?:declare|typeset)(?:[ \t]+-\w+)?)[ \t\v])[ \t\v]*"
    r"([A-Za-z_]\w*)(\+?=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|)\"']*)(?=[\s;&|)]|\Z)",
    re.MULTILINE,
)
_LONGEST = 256  # characters of a value; no version, tag or address is longer
_GROWTH = 1_000_000  # characters that values may add to a text


def substituted(text: str, values: Mapping[str, str]) -> tuple[str, list[int]]:
    """A text with known names replaced, and for each character the offset in the original that it comes from."""
    pieces: list[str] = []
    offsets: list[int] = []
    last = added = 0
    for found in NAME.finditer(text) if values else ():
        value = values.get(found[1] or found[2])
        if value is None or len(value) > _LONGEST or added > _GROWTH:
            continue
        added += len(value)
        pieces += [text[last : found.start()], value]
        offsets += [*range(last, found.start()), *([found.start()] * len(value))]
        last = found.end()
    pieces.append(text[last:])
    offsets += range(last, len(text) + 1)
    return "".join(pieces), offsets


def environment(rest: str, values: Mapping[str, str], managed: Container[str]) -> dict[str, str]:
    """The known names after an ENV; one that is given something unknown is known no more.

    Managed names are left out: they are checked where they stand.
    """
    if "=" not in rest.partition(" ")[0]:
        rest = rest.replace(" ", "=", 1)
    return _given(dict(values), _PAIR.findall(rest), values, managed)


def assigned(text: str, values: Mapping[str, str], managed: Container[str]) -> dict[str, str]:
    """The known names in a script that assigns to some of them; one that is assigned twice is not known."""
    once: dict[str, str] = {}
    for name, sign, value in _ASSIGNED.findall(text):
        once[name] = "$" if name in once or sign != "=" else value
    return _given(dict(values), list(once.items()), values, managed)


def _given(
    known: dict[str, str], pairs: list[tuple[str, str]], values: Mapping[str, str], managed: Container[str]
) -> dict[str, str]:
    for name, written in pairs:
        value = written[1:-1] if written[:1] in ('"', "'") else written
        value = substituted(value, values)[0]
        if name in managed or re.search(r"[$`\\\s]", value) or len(value) > _LONGEST:
            known.pop(name, None)
        else:
            known[name] = value
    return known
