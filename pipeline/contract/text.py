"""Text that somebody else wrote, made safe to print."""

from __future__ import annotations

import re

_SHOWN = 160


def shown(text: object, limit: int = _SHOWN) -> str:
    """Spell foreign text so that it can be printed anywhere: no control characters, no lone surrogates, bounded."""
    whole = text if isinstance(text, str) else repr(text)
    cut = whole if len(whole) <= limit else whole[: limit - 1] + "…"
    return "".join(
        c if c.isprintable() and not "\ud800" <= c <= "\udfff" else c.encode("unicode_escape").decode() for c in cut
    )


def without_login(address: str) -> str:
    """An address without `user:password@`, which must reach no log."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", address)
