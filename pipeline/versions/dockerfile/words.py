"""Words of a Dockerfile: what `$`, quotes and escapes in them become."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .layers import Known
from .patterns import compile_pattern, replace, trim
from .rules import ENGINE, BadWord, Frontend
from .splitting import SPACE

_SPECIAL = "@*#?-$!0"


class Style(NamedTuple):
    """How a word is expanded.

    escape      the escape character of the file
    frontend    whose rules
    keep_unset  `$name` without a value stays as it is written (BuildKit looks for heredocs this way)
    keep_marks  quotes and escapes stay (likewise)
    """

    escape: str = "\\"
    frontend: Frontend = ENGINE
    keep_unset: bool = False
    keep_quotes: bool = False
    keep_escapes: bool = False


LARGEST = 1 << 18  # characters of one value; BuildKit itself has no limit but its memory


def expand(text: str, values: Known, style: Style) -> str:
    """What a word becomes: quotes and escapes taken, names replaced; raise `BadWord` where BuildKit refuses it."""
    return _Expansion(text, values, style).run()[0]


def expand_words(text: str, values: Known, style: Style) -> list[str]:
    """The same for a whole line, split at the unquoted spaces that are left after expansion."""
    return _Expansion(text, values, style).run()[1]


class _Expansion:
    """One pass over a word. `at` is the next character; each method takes what it understands and returns it."""

    def __init__(self, text: str, values: Known, style: Style) -> None:
        self.text = text.removeprefix("\ufeff")
        self.at = 0
        self.values = values
        self.style = style
        self.raw = style.keep_escapes

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        char = self.text[self.at : self.at + 1]
        self.at += 1
        return char

    def run(self) -> tuple[str, list[str]]:
        try:
            return self.until("", self.raw)
        except RecursionError:
            raise BadWord("nested too deeply") from None

    def until(self, stop: str, raw: bool) -> tuple[str, list[str]]:
        """Everything up to an unquoted `stop` (which is taken too), or to the end where `stop` is empty."""
        outer, self.raw = self.raw, raw
        try:
            return self._until(stop)
        finally:
            self.raw = outer

    def _until(self, stop: str) -> tuple[str, list[str]]:
        result, words = "", _Words()
        while char := self.peek():
            if char == stop:
                self.take()
                return result, words.all()
            if char == "$":
                piece = self.dollar()
                words.split(piece)
            elif char in "'\"":
                piece = self.single() if char == "'" else self.double()
                words.add(piece)
            elif char == "<" and self.style.frontend >= (1, 16):
                piece = self.less()
                words.add(piece)
            elif char == self.style.escape:
                piece = self.escaped()
                words.add(piece)
            else:
                piece = self.plain(stop) or self.take()
                words.split(piece)
            result += piece
            if len(result) > LARGEST:
                raise BadWord("what it expands to is too large")
        if stop:
            raise BadWord(f"{stop!r} is missing")
        return result, words.all()

    def plain(self, stop: str) -> str:
        """All characters from here on that mean themselves; none where the first may mean something."""
        found = _plain(self.style.escape + stop).match(self.text, self.at)
        self.at += len(found[0]) if found else 0
        return found[0] if found else ""

    def escaped(self) -> str:
        mark = self.take() if self.raw else self.take()[1:]
        return mark + self.take()

    def less(self) -> str:
        """`<`, or `<<` with the blanks after it, which then do not end the word."""
        self.take()
        if self.peek() != "<":
            return "<"
        self.take()
        blanks = ""
        while self.peek() and self.peek() in "\t\r ":
            blanks += self.take()
        return "<<" + blanks

    def single(self) -> str:
        mark = self.take() if self.style.keep_quotes else self.take()[1:]
        end = self.text.find("'", self.at)
        if end < 0:
            raise BadWord("a single quote is not closed")
        inside, self.at = self.text[self.at : end], end + 1
        return mark + inside + mark

    def double(self) -> str:
        mark = self.take() if self.style.keep_quotes else self.take()[1:]
        result = mark
        while char := self.peek():
            if char == '"':
                self.take()
                return result + mark
            if char == "$":
                result += self.dollar()
                continue
            self.take()
            if char == self.style.escape:
                result += char if self.raw else ""
                following = self.peek()
                if not following:
                    break
                if following in ('"', "$", self.style.escape):
                    char = self.take()
            result += char
        raise BadWord("a double quote is not closed")

    def dollar(self) -> str:
        self.take()
        if self.peek() != "{":
            name = self.name()
            if not name:
                return "$"
            return self.value(name, f"${name}")
        self.take()
        if self.peek() in ("", "{", "}", ":"):
            raise BadWord("bad substitution")
        name = self.name()
        mark = self.take()
        if mark == "}":
            return self.value(name, f"${{{name}}}")
        if mark == "/":
            return self.replace(name)
        colon = mark == ":"
        if colon:
            mark = self.take()
        if not colon and (not mark or mark not in "+-?#%"):
            raise BadWord(f"unsupported modifier {mark!r} in ${{{name}...}}")
        return self.modified(name, mark, colon)

    def value(self, name: str, written: str) -> str:
        found = self.values.get(name)
        if found is None:
            return written if self.style.keep_unset else ""
        return found

    def name(self) -> str:
        """A name, a number, one special parameter, or nothing."""
        first = self.peek()
        if not first:
            return ""
        start = self.at
        if first.isdecimal():
            while self.peek().isdecimal():
                self.take()
        elif first in _SPECIAL:
            self.take()
        else:
            while (char := self.peek()) and (char.isalpha() or char.isdecimal() or char == "_"):
                self.take()
        return self.text[start : self.at]

    def modified(self, name: str, mark: str, colon: bool) -> str:
        trims = bool(mark) and mark in "#%"
        if trims and colon and self.style.frontend >= (1, 10):
            raise BadWord(f"unsupported modifier ':{mark}' in ${{{name}...}}")
        word = self.until("}", trims)[0]
        found = self.values.get(name)
        if found is None and self.style.keep_unset:
            return f"${{{name}{':' * colon}{mark}{word}}}"
        missing = found is None or (colon and not found)
        if mark == "-":
            return word if missing else found or ""
        if mark == "+":
            return "" if missing else word
        if mark == "?":
            if missing:
                raise BadWord(f"{name}: {word or ('is empty' if found is not None else 'is not set')}")
            return found or ""
        if trims:
            greedy = word.startswith(mark)
            return trim(found or "", word[greedy:], from_end=mark == "%", greedy=greedy)
        raise BadWord(f"unsupported modifier ':{mark}' in ${{{name}...}}")

    def replace(self, name: str) -> str:
        every = self.peek() == "/"
        if every:
            self.take()
        pattern = self.until("/", True)[0]
        replacement = self.until("}", True)[0]
        found = self.values.get(name)
        if found is None and self.style.keep_unset:
            return f"${{{name}/{pattern}/{replacement}}}"
        return replace(found or "", compile_pattern(pattern, greedy=True), replacement, every=every)


@lru_cache(maxsize=16)
def _plain(others: str) -> re.Pattern[str]:
    """A run without quotes, `$`, `<` and other characters that may mean something."""
    return re.compile(rf"[^$'\"<{re.escape(others)}]+")


_BLANKS = str.maketrans(dict.fromkeys(SPACE, " "))


class _Words:
    """Collects pieces of a line; spaces in some of them end a word, in others not."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.word = ""

    def add(self, piece: str) -> None:
        self.word += piece

    def split(self, piece: str) -> None:
        first, *others = piece.translate(_BLANKS).split(" ")
        self.word += first
        for other in others:
            if self.word:
                self.done.append(self.word)
            self.word = other

    def all(self) -> list[str]:
        if self.word:
            self.done.append(self.word)
            self.word = ""
        return self.done
