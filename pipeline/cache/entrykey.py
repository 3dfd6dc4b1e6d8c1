"""The keys of entries: Python's spelling of a tuple, made by FlashInfer with `str()`, read without evaluating it.

    ('bf16_gemm', 'CublasltBf16GemmRunner', ((1, 4096), (4096, 28672), …, (33554432,)), (1, 28672, torch.bfloat16))
     op           runner class              nearest profile, a shape per input         what the runner adds

`torch.bfloat16` is no literal, and an engine may put any repr there, so every bare word is kept as a `Word`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*")
      | (?P<open>[(\[])
      | (?P<close>[)\]])
      | (?P<comma>,)
      | (?P<number>[+-]?\d{1,18}(?![\w.]))
      | (?P<word>[^\s,()\[\]'"]+ (?:\ +[^\s,()\[\]'"]+)*)
    )""",
    re.VERBOSE,
)
_HEAD = re.compile(r"""\(\s*(['"])(?P<op>(?:(?!\1)[^\\])*)\1\s*,\s*(['"])(?P<runner>(?:(?!\3)[^\\])*)\3\s*,""")
_DEPTH = 32
_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False}


class Word(str):
    """A bare word of a key, such as `torch.bfloat16`: text, but not a string literal."""

    __slots__ = ()


class EntryKey(NamedTuple):
    """A key taken apart. `shapes` has one tuple per input, `extras` what the runner adds; -1 stands for any size."""

    op: str
    runner: str
    shapes: tuple[Any, ...]
    extras: tuple[Any, ...]

    @property
    def bucket(self) -> int | None:
        """The token count: the first input's size but one from the end (`[…, tokens, k]`), where there is one."""
        first = self.shapes[0] if self.shapes else None
        if not isinstance(first, tuple) or not first:
            return None
        size = first[-2] if len(first) > 1 else first[0]
        return size if type(size) is int else None


def op_and_runner(key: str) -> tuple[str, str]:
    """Read only the first two parts, quickly; ("", "") for a string that is no key."""
    match = _HEAD.match(key)
    return (match["op"], match["runner"]) if match else ("", "")


def parse_key(key: str) -> EntryKey | None:
    """Take a key apart; None for any string that FlashInfer's `str()` did not make."""
    value = _value(key)
    if not isinstance(value, tuple) or len(value) != 4:
        return None
    op, runner, shapes, extras = value
    if type(op) is not str or type(runner) is not str or not isinstance(shapes, tuple) or not isinstance(extras, tuple):
        return None
    return EntryKey(op, runner, shapes, extras)


def _value(text: str) -> object:
    """The nested tuples that `text` spells, or None. Iterative: a hostile key cannot exhaust the stack."""
    stack: list[tuple[str, list[Any]]] = []
    done: list[Any] = []
    items = done
    position, due = 0, True  # due: a value may come next, not a comma
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None if text[position:].strip() else _only(done, stack)
        position, kind, piece = match.end(), match.lastgroup, match[match.lastgroup or 0]
        if kind == "comma":
            if due or not stack:
                return None
            due = True
        elif kind == "close":
            if not stack or (stack[-1][0] == "(") != (piece == ")"):
                return None
            _, outer = stack.pop()
            outer.append(tuple(items))
            items, due = outer, False
        elif not due:
            return None
        elif kind == "open":
            if len(stack) >= _DEPTH:
                return None
            stack.append((piece, items))
            items = []
        else:
            items.append(_leaf(kind, piece))
            due = False
    return _only(done, stack)


def _leaf(kind: str | None, token: str) -> object:
    if kind == "number":
        return int(token)
    if kind == "text":
        return re.sub(r"\\(.)", r"\1", token[1:-1])
    return _WORDS.get(token, Word(token))


def _only(done: list[Any], stack: list[tuple[str, list[Any]]]) -> object:
    return done[0] if len(done) == 1 and not stack else None
