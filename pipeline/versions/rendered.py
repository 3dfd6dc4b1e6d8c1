"""Committed files held against what the templates give, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .findings import Finding, printable
from .tree import ordinary, refusal


def compare(root: Path, files: Mapping[str, bytes]) -> list[Finding]:
    """Committed files that are not, byte for byte, what the templates give; each with a unified diff."""
    findings = []
    for path, wanted in files.items():
        try:
            found = Path(ordinary(root / path)).read_bytes()
        except FileNotFoundError:
            findings.append(Finding(path, 0, 0, "is missing; `pipeline versions sync` writes it", "render"))
            continue
        except OSError as error:
            findings.append(Finding(path, 0, 0, refusal(error), "render"))
            continue
        if found != wanted:
            diff = unified(path, found, wanted, "committed", "rendered")
            line = first_difference(found, wanted)
            findings.append(
                Finding(path, line, 0, "differs from its template; run `pipeline versions sync`", "render", diff)
            )
    return findings


def first_difference(found: bytes, wanted: bytes) -> int:
    """The first line, from 1, in which two files differ."""
    pairs = zip(found.split(b"\n"), wanted.split(b"\n"), strict=False)
    return next((number for number, (one, two) in enumerate(pairs, 1) if one != two), found.count(b"\n") + 1)


def unified(path: str, before: bytes, after: bytes, was: str, will: str) -> str:
    """A unified diff of two versions of a file, each named by a word."""
    import difflib

    old, new = (re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "backslashreplace")) for data in (before, after))
    shown = printable(path)
    lines = difflib.unified_diff(old, new, f"{shown} ({was})", f"{shown} ({will})")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
