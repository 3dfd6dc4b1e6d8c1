"""One disagreement, with its place, and the three ways of printing it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.contract.text import closest, shown


class Finding(NamedTuple):
    """What is wrong and where: `path` relative to the tree's root, `line` from 1 (0: the whole file).

    `rule` names the check that found it; `diff` is a unified diff where one says more than words.
    """

    path: str
    line: int
    message: str
    rule: str = ""
    diff: str = ""

    @property
    def place(self) -> str:
        """`path:line`, or the path alone."""
        return f"{self.path}:{self.line}" if self.line else self.path

    def text(self) -> str:
        """One line: the place and the message."""
        return printable(f"{self.place}: {self.message}")

    def github(self) -> str:
        """One workflow command, which GitHub Actions shows beside the line in a pull request."""
        where = f"file={_escape(self.path, ':,')}"
        if self.line:
            where += f",line={self.line}"
        return printable(f"::error {where},title=versions::{_escape(self.message)}")


def printable(text: str) -> str:
    """A text on one line, without what a terminal would obey."""
    return shown(text, len(text))


def printable_diff(diff: str) -> str:
    """A unified diff, line by line, without what a terminal would obey; tabs stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in diff.split("\n"))


def _escape(text: str, further: str = "") -> str:
    for character in "%\r\n" + further:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def render(findings: Iterable[Finding], how: str) -> str:
    """All findings as `text`, `json` or `github`; text ends each finding that has a diff with that diff."""
    rows = list(findings)
    if how == "json":
        fields = ("path", "line", "rule", "message", "diff")
        return json.dumps([{name: getattr(row, name) for name in fields} for row in rows], indent=2) + "\n"
    if how == "github":
        return "".join(row.github() + "\n" for row in rows)
    return "".join(row.text() + "\n" + printable_diff(row.diff) for row in rows)


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "…"?` where a known name is close, else nothing."""
    close = closest(name, known)
    return f'; did you mean "{close}"?' if close else ""
