"""Shell text without what does nothing: comments behind a command, lines that `grep -v` drops, messages on usage."""

from __future__ import annotations

import re

# Quoted texts and escaped characters are passed over, so that a `#` in them begins no comment.
_COMMENT = re.compile(r"\\.|\"(?:[^\"\\\n]|\\.)*+\"|'[^'\n]*+'|(?<![^\s;&|(])#[^\n]*")
_WORDS = r"(?:\\.|\"(?:[^\"\\]|\\.)*+\"|'[^']*+'|[^;&|\n)\"'\\])"
_DROPPED = re.compile(
    rf"(?<![\w./-])[ef]?grep[ \t]+(?:-\S+[ \t]+){{0,8}}?(?:-(?!-)\w*v\w*|--invert-match)\b{_WORDS}*+", re.DOTALL
)
_MESSAGE = re.compile(
    r"(?<![\w./-])(?:echo|printf)[ \t]+(?:-\w+[ \t]+){0,4}"
    r"(?:\"\s*usage\b(?:[^\"\\`$]|\\.|\$(?!\())*+\"|'\s*usage\b[^']*+')"
    r"(?=[ \t]*(?:(?:1?>&2|>[ \t]*/dev/stderr)[ \t]*)?(?:[;)}&\n\v]|\|\||\Z))",
    re.IGNORECASE | re.DOTALL,
)


def quiet(text: str) -> str:
    """A script, or the text of a RUN, with all that blanked; each offset stays what it was."""
    if "#" in text:
        text = _COMMENT.sub(lambda found: _blank(found) if found[0].startswith("#") else found[0], text)
    if "grep" in text:
        text = _DROPPED.sub(_blank, text)
    if "usage" in text.lower():
        text = _MESSAGE.sub(_blank, text)
    return text


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n\v]", " ", found[0])
