"""Text that somebody else wrote, made safe to print; words that messages share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SHOWN = 160


def shown(text: object, limit: int = _SHOWN) -> str:
    """Spell foreign text so that it can be printed anywhere: no control characters, no lone surrogates, bounded."""
    whole = text if isinstance(text, str) else repr(text)
    cut = whole if len(whole) <= limit else whole[: limit - 1] + "…"
    return "".join(
        c if c.isprintable() and not "\ud800" <= c <= "\udfff" else c.encode("unicode_escape").decode() for c in cut
    )


def without_login(address: str) -> str:
    """Text without the `user:password@` of its addresses, which must reach no log; of a bare one only at its start.

    A user alone of `ssh://` stays: it is no secret, and the address is of no use without it.
    """
    return _LOGIN.sub("", address)


_LOGIN = re.compile(
    r"(?<=://)(?<!ssh://)[^/\s]*@(?!sha256:)"
    r"|(?<=://)[^/@\s:\[]+:(?!\s|\d+(?:\W|$))(?:(?!://)[^@\n]){1,200}@(?:[^/@\s]*@)*(?!sha256:)"  # with `/` or a blank
    r"|^[^/@\s:]+:[^/@\s]+@(?!sha256:)"
)


def pluralize(number: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {what}{'s' * (number != 1)}"


def closest(word: str, known: Iterable[str]) -> str:
    """The name that `word` may have meant, whatever the case of its letters; empty where none is close."""
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), names, n=1)
    return names[close[0]] if close else ""
