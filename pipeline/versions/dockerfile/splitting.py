"""The rest of an ARG or ENV split into words, quotes and escapes left in them."""

from __future__ import annotations

from typing import NamedTuple

_WIDE_SPACE = "\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
SPACE = "\t\n\v\f\r \x85\xa0" + _WIDE_SPACE  # what Go calls a space; Python's idea differs


class Word(NamedTuple):
    """One word as it stands in the line, quotes and all, and the offset of its first character."""

    text: str
    offset: int


def split(line: str, escape: str) -> list[Word]:
    """Split the rest of an ARG or ENV at unquoted spaces; quotes and escapes stay in the words.

    An open quote reaches to the end of the line here; expanding the word is what refuses it.
    """
    words: list[Word] = []
    word, start, quote, seen_quote = "", -1, "", False
    at = 0

    def close() -> None:
        if word or seen_quote:
            words.append(Word(word, start))

    while at < len(line):
        char = line[at]
        if start < 0:
            if char not in SPACE:
                start = at
                continue
            at += 1
            continue
        if not quote and char in SPACE:
            close()
            word, start, seen_quote = "", -1, False
            at += 1
            continue
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote, seen_quote = char, True
        if char == escape and quote != "'":
            if at + 1 == len(line):  # an escape that ends the line is dropped
                quote = ""
                at += 1
                continue
            word += char
            at += 1
            char = line[at]
        word += char
        at += 1
    if start >= 0:
        close()
    return words
