"""Numbers as they are given on a command line: read alike, and within the same bounds, on the host and in the image.

A value that the host takes must be one that the ranks take too: it is handed on as it was given.
"""

from __future__ import annotations

import argparse
import contextlib

_DAY, _HOUR = 86_400, 3600


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
