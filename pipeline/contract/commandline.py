"""How a command line is refused, on the host and in the image, and the paths that it may name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse with our way of refusing: one line, a hint, exit 2."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` in place of printing and leaving."""
        raise UsageError(message, hint=f"see `{self.prog} --help`")


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
