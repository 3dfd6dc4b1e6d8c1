"""Shell text without what does nothing: comments behind a command, lines that `grep -v` drops, messages on usage."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Container

from .variables import assigned, substituted

# Quoted texts and escaped characters are passed over, so that a `#` in them begins no comment. Over several lines only
# where the quote does not stand behind a letter: what is read may be no shell, and the `'` of "don't" opens nothing.
_COMMENT = re.compile(
    r"\\.|\"(?:[^\"\\\n]|\\.)*+\"|'[^'\n]*+'|(?<!\w)(?:\"(?:[^\"\\]|\\.)*+\"|'[^']*+')|(?<![^\s;&|(])#[^\n]*", re.DOTALL
)
_WORDS = r"(?:\\.|\"(?:[^\"\\]|\\.)*+\"|'[^']*+'|[^;&|\n)\"'\\])"
# The following are texts, compiled at their first use: few files have what they look for.
_DROPPED = rf"(?s)(?<![\w./-])[ef]?grep[ \t]+(?:-\S+[ \t]+){{0,8}}?(?:-(?!-)\w*v\w*|--invert-match)\b{_WORDS}*+"
_MESSAGE = (
    r"(?is)(?<![\w./-])(?:echo|printf)[ \t]+(?:-\w+[ \t]+){0,4}"
    r"(?:\"\s*usage\b(?:[^\"\\`$]|\\.|\$(?!\())*+\"|'\s*usage\b[^']*+')"
    r"(?=[ \t]*(?:(?:1?>&2|>[ \t]*/dev/stderr)[ \t]*)?(?:[;)}&\n\v]|\|\||\Z))"
)
_PRINTED = (  # `cat <<EOF`, whose text goes to the terminal
    r"(?m)(?<![\w./(`-])cat[ \t]*(?:1?>&2[ \t]*)?<<-?[ \t]*([\"']?)(\w+)\1[ \t]*(?:1?>&2[ \t]*)?(?:;[^\n]*)?\n"
    r"((?:(?![ \t]*\2[ \t]*$)[^\n]*\n)*)"
)
_USAGE = r"(?im)^[ \t]*usage\b"


def quiet(text: str) -> str:
    """A script, or the text of a RUN, with all that blanked; each offset stays what it was."""
    if "#" in text:
        text = _COMMENT.sub(lambda found: _blank(found) if found[0].startswith("#") else found[0], text)
    if "grep" in text:
        text = re.sub(_DROPPED, _blank, text)
    if "usage" in text.lower():
        text = re.sub(_MESSAGE, _blank, text)
        text = re.sub(_PRINTED, lambda found: _blank(found) if re.search(_USAGE, found[3]) else found[0], text)
    return text


def joined(text: str) -> str:
    """A script with its continued lines joined; each offset stays what it was, and `\v` marks where a line ended."""
    return re.sub(r"\\\r?\n", lambda found: " " * (len(found[0]) - 1) + "\v", text)


def script(text: str, managed: Container[str]) -> tuple[str, Callable[[int], int]]:
    """A script as its commands read: quiet, continued lines joined, what its variables hold put in.

    The second is the line of an offset. Managed names are left as they stand.
    """
    whole = joined(quiet(re.sub(r"(?m)^[ \t]*//[^\n]*$", "", text)))
    held = assigned(whole, {}, managed)
    whole = substituted(whole, held)[0] if held else whole
    ends = [end.start() for end in re.finditer("[\n\v]", whole)]
    return whole, lambda at: 1 + bisect_left(ends, at)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n\v]", " ", found[0])
