"""The places of one Dockerfile at which versions stand: its ARGs, its base images, and the text of its instructions."""

from __future__ import annotations

from collections.abc import Iterator

from .dockercommands import commands
from .dockerfile import (
    ENGINE,
    NEWEST,
    Dockerfile,
    Problem,
    named_by,
    read,
)
from .texts import Found, Texts
from .variables import NAME


class Dockerplaces:
    """A Dockerfile under every frontend that may read it: a value that depends on which one is looked at twice."""

    def __init__(self, texts: Texts, text: str) -> None:
        self.texts = texts
        first = read(text, frontend=ENGINE)
        asked = named_by(first.syntax)
        self.readings = [read(text, frontend=asked)] if first.syntax else [first, read(text, frontend=NEWEST)]

    @property
    def problems(self) -> list[Problem]:
        """What BuildKit refuses."""
        return sorted({problem for reading in self.readings for problem in reading.problems})

    def args(self) -> Iterator[tuple[int, str, str | None, bool]]:
        """Line, name and value of each ARG, and whether it is made of others; None where no default is written."""
        seen: set[tuple[int, str, str | None, bool]] = set()
        for reading in self.readings:
            for arg in (*reading.args, *reading.held):
                value = arg.value if arg.raw is not None else None
                seen.add((arg.line, arg.name, value, NAME.search(arg.raw or "") is not None))
        return iter(sorted(seen, key=lambda row: (row[0], row[1], row[2] or "")))

    def inside(self) -> Iterator[tuple[int, Found]]:
        """Line and what was found there, of everything but the ARGs."""
        reading = self.readings[0]
        wrong = self._wrong_args(reading)
        for stage in reading.stages:
            if stage.parent is None and not wrong & _names(stage.raw_base):
                yield from ((stage.line, found) for found in self.texts.look(stage.base))
        yield from commands(reading, self.texts)

    def _wrong_args(self, reading: Dockerfile) -> set[str]:
        """ARGs that are findings themselves, so that what is built from them need not be one again."""
        managed = self.texts.versions
        found = {arg.name for arg in reading.args if arg.name in managed and arg.value not in (None, managed[arg.name])}
        return found | {arg.name for arg in reading.args if any(one.wrong for one in self.texts.look(arg.value or ""))}


def _names(text: str) -> set[str]:
    return {first or second for first, second in NAME.findall(text)}
