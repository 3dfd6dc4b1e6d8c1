"""JSON with places: every value knows where it stands, and one pass reports all that is wrong.

The standard library's reader keeps the last of two equal names, knows no line of a value, and stops at the first
slip. A source that people edit by hand needs the contrary; scalars are still read by the standard library.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DIGITS = 1000  # Python refuses to read 4300 and more


class Value(NamedTuple):
    """A JSON value and the half-open range of characters it takes; `data` of an object is its members in order."""

    start: int
    end: int
    data: str | int | float | bool | tuple[Member, ...] | tuple[Value, ...] | None

    @property
    def members(self) -> tuple[Member, ...] | None:
        """The members where this is an object, else None."""
        data = self.data
        return data if isinstance(data, _Object) else None


class _Object(tuple["Member", ...]):
    """Tells an object's members from an array's values, even when both are empty."""

    __slots__ = ()


class Member(NamedTuple):
    """One name of an object, where it stands, and its value."""

    name: str
    start: int
    value: Value


@dataclass
class Document:
    """A text, its value (None where nothing could be read), and `(offset, message)` of everything wrong in it."""

    text: str
    value: Value | None = None
    problems: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = [0, *accumulate(len(line) + 1 for line in self.text.split("\n")[:-1])]

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of a character."""
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1


class _Stop(Exception):
    """Nothing after this place can be understood."""


def parse(text: str) -> Document:
    """Read a JSON document; never raises for bad input, `problems` says what is wrong."""
    document = Document(text)
    reader = _Reader(document)
    if text.startswith("\ufeff"):
        document.problems.append((0, "begins with a byte order mark; save it as UTF-8 without one"))
        reader.at = 1
    try:
        document.value = reader.value()
        reader.skip()
        if reader.at < len(text):
            document.problems.append((reader.at, "text after the end of the document"))
    except _Stop:
        pass
    except RecursionError:
        document.problems.append((reader.at, "nested too deeply"))
    return document


def plain(text: str) -> object:
    """What `json.loads` makes of a text with which `parse` finds no fault, in a fraction of its time.

    None where there is a fault, or may be one: `parse` knows.
    """

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a duplicate name")
        return found

    if _ESCAPED_SURROGATE.search(text):
        return None
    try:
        return json.loads(text, object_pairs_hook=members, parse_constant=_constant, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)


class _Reader:
    def __init__(self, document: Document) -> None:
        self.text = document.text
        self.problems = document.problems
        self.at = 0
        self.scalar = json.JSONDecoder(parse_constant=_constant, parse_int=_integer)

    def skip(self) -> str:
        """Pass white space; return the next character, or an empty string at the end."""
        passed = _SPACE.match(self.text, self.at)
        self.at = passed.end() if passed else self.at
        return self.text[self.at : self.at + 1]

    def stop(self, message: str) -> _Stop:
        self.problems.append((min(self.at, max(len(self.text) - 1, 0)), message))
        return _Stop()

    def value(self) -> Value:
        start_char = self.skip()
        if start_char == "{":
            return self._object()
        if start_char == "[":
            return self._array()
        if not start_char:
            raise self.stop("ends where a value is expected")
        start = self.at
        try:
            data, self.at = self.scalar.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.at = error.pos
            raise self.stop(_plain(error.msg, self.text[error.pos : error.pos + 1])) from None
        except ValueError as error:
            raise self.stop(str(error)) from None
        if isinstance(data, str) and _SURROGATE.search(data):
            self.problems.append((start, "half of a surrogate pair stands alone, which is no character"))
            data = _SURROGATE.sub("\ufffd", data)
        return Value(start, self.at, data)

    def _object(self) -> Value:
        start = self.at
        self.at += 1
        members: list[Member] = []
        first: dict[str, int] = {}
        while self._more("}", bool(members)):
            name_at = self.at
            if self.text[self.at] != '"':
                raise self.stop("a name in double quotes is expected here")
            name = str(self.value().data)
            if self.skip() != ":":
                raise self.stop(f'":" is expected after "{name}"')
            self.at += 1
            members.append(Member(name, name_at, self.value()))
            if name in first:
                line = self.text.count("\n", 0, first[name]) + 1
                self.problems.append((name_at, f'duplicate name "{name}", first on line {line}'))
            first.setdefault(name, name_at)
        return Value(start, self.at, _Object(members))

    def _array(self) -> Value:
        start = self.at
        self.at += 1
        values: list[Value] = []
        while self._more("]", bool(values)):
            values.append(self.value())
        return Value(start, self.at, tuple(values))

    def _more(self, closing: str, started: bool) -> bool:
        """Stand before the next element, or behind the closing bracket; say which."""
        char = self.skip()
        if char == closing:
            self.at += 1
            return False
        if started:
            if char != ",":
                raise self.stop(
                    f'"," or "{closing}" is expected here' if char else f'"{closing}" is missing at the end'
                )
            comma = self.at
            self.at += 1
            if self.skip() == closing:
                self.problems.append((comma, f'trailing comma before "{closing}"'))
                self.at += 1
                return False
        if not self.skip():
            raise self.stop(f'"{closing}" is missing at the end')
        return True


def _plain(message: str, char: str) -> str:
    if message.startswith("Expecting value"):
        return f"a value is expected here, not {char!r}" if char else "ends where a value is expected"
    return message[:1].lower() + message[1:]
