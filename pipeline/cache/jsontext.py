"""JSON read strictly and within bounded memory, for files that anyone may have written.

Python's own reader takes NaN, keeps the last of two equal keys, recurses as deep as the text asks and expands a
text to many times its size. Here each of these is either refused or reported.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from pipeline.contract.errors import CacheRefused, UsageError

from . import finding
from .finding import Finding, Tally, shown

LIMIT = 32 * 1024 * 1024  # bytes; 10,000 entries are about 2 MB
_VALUES = 4_000_000  # separators and brackets: bounds what the text can grow to in memory
_DEPTH = 64


class CacheMissing(UsageError):
    """The file to read is not there, or may not be read."""


class CacheUnreadable(CacheRefused):
    """The bytes hold no cache at all; `because` is the cause's short name."""

    because = ""

    def __init__(self, message: str, *, hint: str = "tune again, or take an intact copy") -> None:
        super().__init__(message, hint=hint)


class CacheNotFile(CacheUnreadable):
    """A directory, device, pipe or socket where a file is expected."""

    because = finding.NOT_A_FILE


class CacheTooLarge(CacheUnreadable):
    """More bytes, or more values, than any cache has."""

    because = finding.TOO_LARGE


class CacheNotUtf8(CacheUnreadable):
    """Bytes that are not UTF-8."""

    because = finding.NOT_UTF8


class CacheNotJson(CacheUnreadable):
    """Text that is not JSON: empty, truncated, or something else."""

    because = finding.NOT_JSON


class CacheTooDeep(CacheUnreadable):
    """JSON nested deeper than any cache is."""

    because = finding.TOO_DEEP


class CacheNotObject(CacheUnreadable):
    """JSON, but not an object."""

    because = finding.NOT_AN_OBJECT


def read_bytes(path: Path, limit: int = LIMIT, *, pipe: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes; the size is looked at before anything is read.

    `pipe` allows a pipe too, such as a shell's `<(…)`. Raises `CacheMissing`, `CacheNotFile`, `CacheTooLarge`.
    """
    try:
        # Non-blocking, so that a named pipe without a writer does not hold us.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheMissing(f"cannot read {shown(str(path))}: {reason}", hint="give the path of a file") from error
    facts = os.fstat(handle)
    if pipe and stat.S_ISFIFO(facts.st_mode):
        os.set_blocking(handle, True)  # without a writer it ends at once
    elif not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise CacheNotFile(f"{shown(str(path))} is not a regular file", hint="give the path of a regular file")
    with os.fdopen(handle, "rb") as stream:
        if facts.st_size > limit:
            raise CacheTooLarge(_too_large(shown(str(path)), facts.st_size, limit))
        try:
            data = stream.read(limit + 1)  # it may have grown since
        except OSError as error:
            reason = f"cannot read {shown(str(path))}: {error.strerror}"
            raise CacheMissing(reason, hint="give the path of a file") from error
    if len(data) > limit:
        raise CacheTooLarge(_too_large(shown(str(path)), len(data), limit))
    return data


def parse_object(data: bytes, where: str, limit: int = LIMIT) -> tuple[dict[str, Any], list[Finding]]:
    """Parse an object; return it with what is wrong but survivable: equal keys (the last counts), NaN, Infinity.

    Raises a subclass of `CacheUnreadable` when there is no object to return.
    """
    if len(data) > limit:
        raise CacheTooLarge(_too_large(where, len(data), limit))
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _VALUES:
        raise CacheTooLarge(f"{where} holds more than {_VALUES:,} values, more than any cache")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CacheNotUtf8(f"{where} is not UTF-8 (byte {error.start})") from error
    found: list[Finding] = []
    value = _parse(text, where, found)
    if not isinstance(value, dict):
        raise CacheNotObject(f"{where} holds a JSON {_kind(value)}, not an object")
    if _deeper(value, _DEPTH):
        raise CacheTooDeep(f"{where} nests deeper than {_DEPTH} levels")
    return value, found


def _parse(text: str, where: str, found: list[Finding]) -> Any:  # noqa: ANN401 - any JSON value
    twice = Tally(found, where, finding.DUPLICATE)
    odd = Tally(found, where, finding.NOT_A_NUMBER)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        whole = dict(items)
        if len(whole) != len(items):
            seen: set[str] = set()
            for name, _ in items:
                if name in seen:
                    twice.add(lambda name=name: f"the key {shown(name)} stands twice")  # type: ignore[misc]
                seen.add(name)
        return whole

    def constant(name: str) -> None:
        odd.add(lambda: f"{shown(name, 20)} is not a JSON number")

    def number(digits: str) -> float | None:
        value = float(digits)
        if math.isfinite(value):
            return value
        constant(digits)
        return None

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except RecursionError as error:
        raise CacheTooDeep(f"{where} is nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        what = (
            "is empty" if not text.strip() else f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        )
        raise CacheNotJson(f"{where} {what}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise CacheNotJson(f"{where} holds a number that is too long") from error
    twice.close()
    odd.close()
    return value


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


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _too_large(where: str, size: int, limit: int) -> str:
    return f"{where} has {size:,} bytes, more than the {limit:,} that a cache file may have"
