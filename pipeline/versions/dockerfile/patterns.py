"""Shell patterns in `${name#pattern}`, `${name%pattern}` and `${name/pattern/replacement}`, as Go reads them."""

from __future__ import annotations

import re

from .rules import BadWord


def compile_pattern(pattern: str, *, greedy: bool) -> re.Pattern[str]:
    """A shell pattern (`*`, `?`, no brackets) as a regular expression."""
    out = ""
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            out += "[^\\n]*" if greedy else "[^\\n]*?"
        elif char == "?":
            out += "[^\\n]"
        elif char == "\\":
            following = pattern[at : at + 1]
            if following in ("}", "/"):  # escaped for the braces around the pattern, not for the pattern
                continue
            if following not in ("*", "?", "\\"):
                raise BadWord(f"invalid escape '\\{following}' in a pattern")
            out += re.escape(following)
            at += 1
        else:
            out += re.escape(char)
    return re.compile(out)


def trim(value: str, pattern: str, *, from_end: bool, greedy: bool) -> str:
    """`value` without the shortest, or longest, piece at its start or end that the pattern fits."""
    if not from_end:
        found = compile_pattern(pattern, greedy=greedy).match(value)
        return value[found.end() :] if found else value
    pieces = re.findall(r"\\.|.", pattern, re.DOTALL)
    found = compile_pattern("".join(reversed(pieces)), greedy=greedy).match(value[::-1])
    return value[: len(value) - found.end()] if found else value


def replace(value: str, pattern: re.Pattern[str], replacement: str, *, every: bool) -> str:
    """`value` with the first, or every, piece that the pattern fits replaced."""
    if not every:
        found = pattern.search(value)
        return value[: found.start()] + replacement + value[found.end() :] if found else value
    out, last, end = "", 0, -1
    for found in pattern.finditer(value):
        if found.end() == found.start() == end:  # Go passes over an empty match that touches the one before
            continue
        out += value[last : found.start()] + _template(replacement, found[0])
        last = end = found.end()
    return out + value[last:]


def _template(replacement: str, whole: str) -> str:
    """Go reads `$0`, `$name`, `${name}`, `$$` in the replacement of "every"; only the whole match has a value."""

    def one(found: re.Match[str]) -> str:
        name = found[1] or found[2] or ""
        return "$" if found[0] == "$$" else whole if name == "0" else ""

    return re.sub(r"\$\$|\$(\w+)|\$\{(\w+)\}", one, replacement)
