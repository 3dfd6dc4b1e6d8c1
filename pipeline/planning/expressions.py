"""Expressions (`re:`) in a model's quantization config: refused where they are none, or where they come to no end.

An expression is matched with Python's `re`, as compressed-tensors and the servers match it, so that a plan says what a
server does; a library with a bound of its own has another dialect. `re` itself knows none, and a repeat inside a repeat
may keep it busy for years. So every expression is tried first on every name in a copy of this process (`beside`), whose
processor time the kernel bounds; what is done here afterwards is no more than what was done there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.beside import OutOfBounds, Tell, beside
from pipeline.cache.finding import shown

from .problems import Problems

PREFIX = "re:"
SECONDS = 2  # of a processor, for all expressions of a model; those of checkpoints take some milliseconds
_SHOWN = 60


@dataclass(frozen=True)
class Expression:
    """What stands behind `re:`, and in which field of config.json."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"config.json: {shown(self.field, _SHOWN)} names {shown(repr(PREFIX + self.text), _SHOWN)}"


def expressions(field: str, patterns: Iterable[str], problems: Problems) -> list[Expression]:
    """Those among the patterns of a field that are expressions; what `re` cannot read is added to `problems`."""
    found = [Expression(field, pattern.removeprefix(PREFIX)) for pattern in patterns if pattern.startswith(PREFIX)]
    for one in found:
        try:
            re.compile(one.text)
        except (re.error, OverflowError, RecursionError) as error:
            problems.add(f"{one}, which is no expression: {error}")
    return found


def try_all(found: Sequence[Expression], names: Sequence[str], problems: Problems) -> bool:
    """Whether every expression can be matched with every name within `SECONDS`.

    The one at which they are over is added to `problems`. Where `beside` can make no copy there is no bound.
    """

    def work(tell: Tell) -> None:
        for number, one in enumerate(found):
            tell(str(number))
            match = re.compile(one.text).match
            for name in names:
                match(name)

    with beside(work, seconds=SECONDS) as answer:
        try:
            answer()
            return True
        except OutOfBounds as error:
            problems.add(
                f"{found[int(error.at or 0)]}, which {error.what} on the names of this model's modules",
                "write it without a repeat inside a repeat, or list the modules; a server may hang on it as well",
            )
            return False
