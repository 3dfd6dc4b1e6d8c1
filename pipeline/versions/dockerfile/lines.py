"""A Dockerfile as instructions: parser directives, continuations, comments and heredocs taken, line numbers kept."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .rules import BadWord, Frontend
from .splitting import SPACE
from .words import Style, expand_words

_DIRECTIVE = re.compile(r"#[\s\x85\xa0]*([a-zA-Z][a-zA-Z0-9]*)[\t\n\f\r ]*=[\t\n\f\r ]*(.+?)[\t\n\f\r ]*\Z")
_BLANKS = re.compile(r"[\t\v\f\r ]+")
_LONGEST = 64 * 1024  # bytes of one line, its end included
_WITH_HEREDOCS = ("RUN", "COPY", "ADD")
NAMES = frozenset({
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD",
    "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
})  # fmt: skip


class Problem(NamedTuple):
    """Something that BuildKit refuses, and its line."""

    line: int
    message: str


class Heredoc(NamedTuple):
    """A heredoc's terminator, the line of its body's first line, and the body's lines without their ends."""

    name: str
    first: int
    lines: tuple[str, ...]


class Instruction(NamedTuple):
    """One instruction: its name in upper case, its flags, and the rest as one line.

    `first` and `last` are lines of the file, heredocs included; `starts` says at which offset of `rest` each
    physical line begins.
    """

    name: str
    flags: tuple[str, ...]
    rest: str
    first: int
    last: int
    starts: tuple[tuple[int, int], ...]
    heredocs: tuple[Heredoc, ...] = ()

    def line_at(self, offset: int) -> int:
        """The line of the file on which a character of `rest` stands."""
        found = bisect_right(self.starts, (offset, 1 << 60))
        return self.starts[max(found - 1, 0)][1]


@dataclass
class Lines:
    """Everything that was understood of a file, the escape character, and what BuildKit would refuse."""

    instructions: list[Instruction] = field(default_factory=list)
    escape: str = "\\"
    syntax: str = ""
    problems: list[Problem] = field(default_factory=list)


class _Refused(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(line, message)


def read_lines(text: str, frontend: Frontend) -> Lines:
    """Take a file apart; what BuildKit refuses becomes a problem; a heredoc without end stops the reading."""
    result = Lines()
    try:
        _Reader(text, frontend, result).run()
    except _Refused as refused:
        result.problems.append(refused.problem)
    if not result.instructions and not result.problems:
        result.problems.append(Problem(1, "there is no instruction in this file"))
    return result


def split_instruction(line: str, escape: str, frontend: Frontend) -> tuple[str, tuple[str, ...], str, int]:
    """Name in upper case, flags, the rest without outer space, and the offset of that rest in the line."""
    start = len(line) - len(line.lstrip(SPACE))
    whole = line.strip(SPACE)
    blank = _BLANKS.search(whole)
    if blank is None:
        return whole.upper(), (), "", len(line)
    flags, at = _flags(whole, blank.end(), escape if frontend >= (1, 15) else "\\")
    rest = whole[at:].lstrip(SPACE)
    return whole[: blank.start()].upper(), flags, rest, start + len(whole) - len(rest)


def _flags(line: str, at: int, escape: str) -> tuple[tuple[str, ...], int]:
    """The words at `at` that begin with `--`, up to `--` itself, and where what follows them begins."""
    flags: list[str] = []
    while True:
        while at < len(line) and line[at] in SPACE:
            at += 1
        if not line.startswith("--", at):
            return tuple(flags), at
        word, quote, quoted = "", "", False
        while at < len(line) and (quote or line[at] not in SPACE):
            char = line[at]
            at += 1
            if char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote, quoted = char, True
            elif char == escape:
                word += line[at : at + 1]
                at += 1
            else:
                word += char
        if word == "--":
            return tuple(flags), at
        if word or quoted:
            flags.append(word)


class _Reader:
    def __init__(self, text: str, frontend: Frontend, result: Lines) -> None:
        self.frontend = frontend
        self.result = result
        self.lines = text.removeprefix("\ufeff").split("\n")
        if self.lines[-1] == "":
            self.lines.pop()
        self.at = 0  # lines taken so far, so also the number of the line taken last
        self.directives: set[str] | None = set()  # None once they may no longer come

    def take(self) -> str | None:
        """The next line, without its end; None at the end of the file."""
        if self.at >= len(self.lines):
            return None
        line = self.lines[self.at]
        self.at += 1
        end = self.at < len(self.lines)
        if len(line) * 4 >= _LONGEST and len(line.encode("utf-8", "replace")) + end > _LONGEST - (not end):
            raise _Refused(self.at, f"the line is longer than {_LONGEST - 1} bytes")
        return line.rstrip("\r\n")

    def run(self) -> None:
        while (taken := self.take()) is not None:
            first = self.at
            line = taken.lstrip(SPACE)
            self._directive(line)
            if line.startswith("#") or not line:
                continue
            text, starts = self._joined(line)
            self._instruction(text, first, starts)

    def _directive(self, line: str) -> None:
        if self.directives is None:
            return
        known = {"syntax", "escape", "check"} if self.frontend >= (1, 8) else {"syntax", "escape"}
        found = _DIRECTIVE.match(line)
        name = found[1].lower() if found else ""
        if found is None or name not in known:
            self.directives = None
            return
        if name in self.directives:
            raise _Refused(self.at, f"a second {name} directive")
        self.directives.add(name)
        if name == "syntax":
            self.result.syntax = found[2].partition(" ")[0]
        if name == "escape":
            if found[2] not in ("\\", "`"):
                raise _Refused(self.at, f"the escape character must be \\ or `, not {found[2]!r}")
            self.result.escape = found[2]

    def _joined(self, line: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """A line with its continuations; comments and empty lines among them are passed over."""
        mark = re.escape(self.result.escape)
        continued = re.compile(rf"([^{mark}]){mark}[ \t]*\Z|\A{mark}[ \t]*\Z")
        text, starts = "", []
        while True:
            starts.append((len(text), self.at))
            found = continued.search(line)
            if found is None:
                return text + line, tuple(starts)
            text += line[: found.start()] + (found[1] or "")
            following = self.take()
            while following is not None and (following.strip(SPACE) == "" or following.lstrip(SPACE).startswith("#")):
                following = self.take()
            if following is None:
                return text, tuple(starts)
            line = following

    def _instruction(self, text: str, first: int, starts: tuple[tuple[int, int], ...]) -> None:
        name, flags, rest, offset = split_instruction(text, self.result.escape, self.frontend)
        if name not in NAMES:
            self.result.problems.append(Problem(first, f"unknown instruction {name[:40]!r}"))
        inner, inner_rest = name, rest
        if name == "ONBUILD" and rest:
            inner, _, inner_rest, _ = split_instruction(rest, self.result.escape, self.frontend)
        heredocs: tuple[Heredoc, ...] = ()
        if inner in _WITH_HEREDOCS and not self._is_json(inner_rest, first):
            heredocs = tuple(self._heredocs(text, first))
        inside = tuple((max(at - offset, 0), line) for at, line in starts)
        self.result.instructions.append(Instruction(name, flags, rest, first, self.at, inside, heredocs))

    def _is_json(self, rest: str, first: int) -> bool:
        """Whether BuildKit takes the rest of a RUN, COPY or ADD as a JSON array."""
        if not rest.startswith("["):
            return False
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return False
        if self.frontend >= (1, 9) and rest[end:].strip(" \t\r\n"):
            return False
        if not all(isinstance(item, str) for item in value):
            raise _Refused(first, "an array in JSON may hold strings only")
        return True

    def _heredocs(self, text: str, first: int) -> Iterator[Heredoc]:
        for name, chomp in heredoc_words(text, self.frontend):
            begin, body = self.at + 1, []
            while (line := self.take()) is not None:
                if (line.lstrip("\t") if chomp else line) == name:
                    break
                body.append(line)
            else:
                raise _Refused(first, f"the heredoc <<{name} has no end")
            yield Heredoc(name, begin, tuple(body))


def heredoc_words(line: str, frontend: Frontend) -> list[tuple[str, bool]]:
    """The terminators of the heredocs that a line opens, each with whether leading tabs are dropped (`<<-`)."""
    if "<<" not in line:
        return []
    looking = Style(frontend=frontend, keep_unset=True, keep_quotes=True, keep_escapes=True)
    try:
        words = expand_words(line, {}, looking)
    except BadWord:
        return []  # BuildKit, too, sees no heredoc in a line that it cannot take apart
    blanks = r"[\t\n\f\r ]*" if frontend >= (1, 16) else ""
    found = []
    for word in words:
        match = re.fullmatch(rf"\d*<<(-?){blanks}([^<]*)", word)
        if match is None or not match[2]:
            continue
        names = expand_words(match[2], {}, Style(frontend=frontend, keep_unset=True))
        if len(names) == 1:
            found.append((names[0], match[1] == "-"))
    return found
