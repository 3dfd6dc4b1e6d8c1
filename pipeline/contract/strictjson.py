"""JSON read strictly and within bounded memory, for files that anyone may have written.

Python's own reader takes NaN, keeps the last of two equal keys, recurses as deep as the text asks and expands a
text to many times its size. Here each of these is either refused or reported.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CacheRefused, UsageError
from .text import shown

LIMIT = 32 * 1024 * 1024  # bytes; a cache file of 10,000 entries has about 2 MB
_VALUES = 4_000_000  # separators and brackets: bounds what the text can grow to in memory
_DEPTH = 64
_KEPT = 1000  # defects of one cause: a hostile file can have millions

# Short names of causes. They are an interface: scripts compare them.
NOT_JSON = "not JSON"
NOT_UTF8 = "not JSON: not UTF-8"
TOO_DEEP = "not JSON: nested too deeply"
NOT_A_NUMBER = "not JSON: NaN or Infinity"
TOO_LARGE = "too large"
NOT_A_FILE = "not a file"
NOT_AN_OBJECT = "not an object"
DUPLICATE = "duplicate key"


class FileMissing(UsageError):
    """The file to read is not there, or may not be read."""


class Unreadable(CacheRefused):
    """The bytes are no JSON object; `because` is the cause's short name."""

    def __init__(self, because: str, message: str, *, hint: str = "tune again, or take an intact copy") -> None:
        super().__init__(message, hint=hint)
        self.because = because


@dataclass(frozen=True)
class Defect:
    """What is wrong with an object that could be read: the cause's short name, and what."""

    because: str
    what: str


def read_bytes(path: Path, limit: int = LIMIT, *, pipe: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes; the size is looked at before anything is read.

    `pipe` allows a pipe too, such as a shell's `<(…)`. Raises `FileMissing` or `Unreadable`.
    """
    where = shown(str(path))
    try:
        # Non-blocking: opening a named pipe without a writer must not wait.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileMissing(f"cannot read {where}: {reason}", hint="give the path of a file") from error
    facts = os.fstat(handle)
    if pipe and stat.S_ISFIFO(facts.st_mode):
        os.set_blocking(handle, True)  # without a writer it ends at once
    elif not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise Unreadable(NOT_A_FILE, f"{where} is not a regular file", hint="give the path of a regular file")
    with os.fdopen(handle, "rb") as stream:
        try:
            data = b"" if facts.st_size > limit else stream.read(limit + 1)  # it may have grown since
        except OSError as error:
            raise FileMissing(f"cannot read {where}: {error.strerror}", hint="give the path of a file") from error
    _check_size(where, max(facts.st_size, len(data)), limit)
    return data


def parse_object(data: bytes, where: str, limit: int = LIMIT) -> tuple[dict[str, Any], tuple[Defect, ...]]:
    """Parse an object; return it with what is wrong but survivable: equal keys (the last counts), NaN, Infinity.

    Raises `Unreadable` when there is no object to return.
    """
    _check_size(where, len(data), limit)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _VALUES:
        raise Unreadable(TOO_LARGE, f"{where} has more than {_VALUES:,} values")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(NOT_UTF8, f"{where} is not UTF-8 (byte {error.start})") from error
    reader = _Reader()
    try:
        value = json.loads(
            text, object_pairs_hook=reader.pairs, parse_constant=reader.constant, parse_float=reader.number
        )
    except RecursionError as error:
        raise Unreadable(TOO_DEEP, f"{where} is nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        said = f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})" if text.strip() else "is empty"
        raise Unreadable(NOT_JSON, f"{where} {said}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise Unreadable(NOT_JSON, f"{where} has a number that is too long") from error
    if not isinstance(value, dict):
        names: dict[type, str] = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
        raise Unreadable(NOT_AN_OBJECT, f"{where} is a JSON {names.get(type(value), 'null')}, not an object")
    if _deeper(value, _DEPTH):
        raise Unreadable(TOO_DEEP, f"{where} nests deeper than {_DEPTH} levels")
    return value, reader.defects()


class _Reader:
    """Hooks for `json.loads` that note what it would take without a word."""

    def __init__(self) -> None:
        self._counts = {DUPLICATE: 0, NOT_A_NUMBER: 0}
        self._found: list[Defect] = []

    def pairs(self, items: list[tuple[str, Any]]) -> dict[str, Any]:
        whole = dict(items)
        if len(whole) != len(items):
            seen: set[str] = set()
            for name, _ in items:
                if name in seen:
                    self._note(DUPLICATE, f"the key {shown(name)} stands twice")
                seen.add(name)
        return whole

    def constant(self, name: str) -> None:
        self._note(NOT_A_NUMBER, f"{shown(name, 20)} is not a JSON number")

    def number(self, digits: str) -> float | None:
        value = float(digits)
        if math.isfinite(value):
            return value
        self.constant(digits)
        return None

    def defects(self) -> tuple[Defect, ...]:
        more = [Defect(why, f"and {n - _KEPT:,} more of this kind") for why, n in self._counts.items() if n > _KEPT]
        return (*self._found, *more)

    def _note(self, because: str, what: str) -> None:
        self._counts[because] += 1
        if self._counts[because] <= _KEPT:
            self._found.append(Defect(because, what))


def _deeper(value: object, limit: int) -> bool:
    """Whether a value nests deeper than `limit`, found without recursing."""
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if type(inner) is list or type(inner) is dict
        ]
        if not level:
            return False
    return True


def _check_size(where: str, size: int, limit: int) -> None:
    if size > limit:
        raise Unreadable(TOO_LARGE, f"{where} has {size:,} bytes, more than the limit of {limit:,}")
