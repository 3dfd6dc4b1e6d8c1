"""Words and numbers of an option's text, as every option of planning takes them."""

from __future__ import annotations

import re

from .problems import Problems

_LONGEST = 12  # digits: what has more is out of range for every option, and is not made a number


def words(text: str) -> tuple[str, ...]:
    """What stands between commas and blanks."""
    return tuple(word for word in re.split(r"[,\s]+", text) if word)


def within(text: str, *, largest: int, smallest: int = 1) -> int | None:
    """ASCII digits, with a sign or without, as a number; None outside `smallest` to `largest`."""
    return number if len(text) <= _LONGEST and smallest <= (number := int(text)) <= largest else None


def whole_number(text: str, option: str, problems: Problems, *, largest: int, smallest: int = 1) -> int | None:
    """The number that an option was given; None where it was given none or a wrong one, which is noted."""
    text = text.strip()
    if not text:
        return None
    takes = f"{option} takes {smallest} to {largest}"
    if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
        problems.add(f"{option}={text} is not a whole number", takes)
    elif (number := within(text, largest=largest, smallest=smallest)) is not None:
        return number
    else:
        problems.add(f"{option}={text} is out of range", takes)
    return None
