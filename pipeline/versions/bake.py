"""Bake files, HCL or JSON, as far as versions go: every string with the path of names to it and its line.

python-hcl2 reads HCL wholly, and `versions audit` uses it; its import and grammar alone take longer than a whole
`versions check` may (docs/measurements-host.md), so this reads what a check needs: blocks, attributes, strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .located_json import Document, Value, parse

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*|//[^\n]*|/\*.*?\*/)
      | (?P<heredoc><<-?[ \t]*(?P<mark>[A-Za-z_][\w-]*)[ \t]*\r?\n(?P<body>.*?)^[ \t]*(?P=mark)[ \t]*\r?$)
      | (?P<string>"(?:[^"\\$%\n]|\\.|[$%](?!\{)|[$%]\{(?:[^"{}]|"(?:[^"\\\n]|\\.)*"|\{[^{}]*\})*\})*")
      | (?P<word>[A-Za-z_][\w-]*)
      | (?P<newline>\n)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


class Text(NamedTuple):
    """One string of a bake file: `("variable", "X", "default")`, `("target", "t", "args", "X")`, …

    A bare name, as in `args = { X = Y }`, is given as what it means, `${Y}`.
    """

    path: tuple[str, ...]
    line: int
    value: str


class NestedTooDeeply(Exception):
    """Brackets within brackets, more than can be followed; `line` is where that was."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def read_hcl(text: str) -> list[Text]:
    """Every string of an HCL file; what is no HCL is passed over; raise `NestedTooDeeply`."""
    reader = _Reader(list(_tokens(text.removeprefix("\ufeff"))))
    try:
        return list(reader.body((), ""))
    except RecursionError:
        raise NestedTooDeeply(reader.peek().line) from None


def read_json(text: str) -> tuple[list[Text], list[tuple[int, str]]]:
    """Every string of a JSON file, and `(line, message)` of what is wrong with it as JSON."""
    document = parse(text)
    problems = [(document.place(at)[0], message) for at, message in document.problems]
    found = list(_values(document, document.value, ())) if document.value is not None else []
    return found, problems


def _values(document: Document, value: Value, path: tuple[str, ...]) -> Iterator[Text]:
    if value.members is not None:
        for member in value.members:
            yield from _values(document, member.value, (*path, member.name))
    elif isinstance(value.data, tuple):
        for item in value.data:
            if isinstance(item, Value):
                yield from _values(document, item, path)
    elif isinstance(value.data, str):
        yield Text(path, document.place(value.start)[0], value.data)


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        if found["heredoc"] is not None:
            yield _Token("string", found["body"], line + 1)
        elif kind == "string":
            yield _Token("string", _unquoted(found[0]), line)
        elif kind != "space":
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")


def _unquoted(literal: str) -> str:
    plain = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\(.)", lambda found: plain.get(found[1], found[1]), literal[1:-1])


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self) -> _Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else _Token("end", "", 0)

    def body(self, path: tuple[str, ...], closing: str) -> Iterator[Text]:
        """Blocks and attributes up to a closing bracket."""
        while (token := self.peek()).kind != "end":
            if closing and token.text == closing and token.kind == "other":
                self.at += 1
                return
            if token.kind not in ("word", "string"):
                self.at += 1
                continue
            words: list[_Token] = []
            while self.peek().kind in ("word", "string"):
                words.append(self.peek())
                self.at += 1
            names = (*path, *(word.text for word in words))
            following = self.peek()
            if following.kind == "other" and following.text == "{":
                self.at += 1
                yield from self.body(names, "}")
            elif following.kind == "other" and following.text in "=:":
                self.at += 1
                yield from self.expression(names)

    def expression(self, path: tuple[str, ...]) -> Iterator[Text]:
        """Every string and name of an expression, which ends with the line, a comma, or the bracket around it."""
        while (token := self.peek()).kind != "end":
            if token.kind == "newline" or (token.kind == "other" and token.text in ",}])"):
                return
            self.at += 1
            if token.kind == "string":
                yield Text(path, token.line, token.text)
            elif token.kind == "word":
                yield Text(path, token.line, f"${{{token.text}}}")
            elif token.kind == "other" and token.text == "{":
                yield from self.body(path, "}")
            elif token.kind == "other" and token.text in "[(":
                yield from self._items(path, "]" if token.text == "[" else ")")

    def _items(self, path: tuple[str, ...], closing: str) -> Iterator[Text]:
        while (token := self.peek()).kind != "end":
            if token.kind == "other" and token.text == closing:
                self.at += 1
                return
            if token.kind == "newline" or (token.kind == "other" and token.text in ",}])"):
                self.at += 1
                continue
            yield from self.expression(path)
