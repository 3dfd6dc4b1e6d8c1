"""Command lines on the host and in the image: how one is refused, and the paths and numbers that it may name.

A value that the host takes must be one that the ranks take too: it is passed on as it was given.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import UsageError
from .text import closest

_DAY, _HOUR = 86_400, 3600  # seconds


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviated options, and refuses by one line, a hint and exit code 2."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401 - as argparse's own
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})

    def format_help(self) -> str:
        """As argparse's, with a usage line of one line: the options are listed below it."""
        if self.usage is None:
            needed = [a for a in self._actions if not a.option_strings or a.required]
            formatter = self._get_formatter()
            formatter.add_usage(None, needed, [], prefix="")
            line = " ".join(formatter.format_help().split()).replace("%", "%%")
            self.usage = line.replace(self.prog, f"{self.prog} [options]", 1)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` in place of printing and leaving."""
        raise UsageError(message, hint=f"see `{self.prog} --help`")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Raise `UsageError` for words that no argument takes; the hint names the option that was meant."""
        known = [name for action in self._actions for name in action.option_strings]
        near = closest(words[0].partition("=")[0], known)
        hint = f"did you mean {near}?" if near else f"see `{self.prog} --help`"
        raise UsageError(f"unrecognized arguments: {' '.join(words)}", hint=hint)


def some(text: str) -> str:
    """An argument that must not be empty. Raises `ArgumentTypeError`."""
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("an empty path (the current folder is `.`)")


def path(text: str) -> Path:
    """An argument that names a file or folder, to read or to write.

    `Path("")` is the current folder, which is not what an unset variable in somebody's script means. Raises
    `ArgumentTypeError`.
    """
    return Path(some(text))


def whole(text: str, of: str, most: int) -> int:
    """An argument that counts `of` something: digits, from 1 to `most`. Raises `ArgumentTypeError`."""
    if text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of {of} from 1 to {most}")


def seconds(text: str) -> int:
    """An argument that bounds a wait: a whole number of seconds from 1 to a day. Raises `ArgumentTypeError`."""
    return whole(text, "seconds", _DAY)


def budget(text: str) -> float:
    """An argument that gives seconds per op and bucket: above 0, up to an hour. Raises `ArgumentTypeError`."""
    with contextlib.suppress(ValueError):
        if text.isascii() and 0 < (value := float(text)) <= _HOUR:  # not so for nan
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, up to {_HOUR}")
