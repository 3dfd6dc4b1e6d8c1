"""Which system this is, as os-release(5) tells it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FILES = (Path("/etc/os-release"), Path("/usr/lib/os-release"))


@dataclass(frozen=True)
class System:
    """`id` (`debian`, `ubuntu`, …) and the ids it is `like`, the major version (None on a rolling release), names."""

    id: str
    like: tuple[str, ...]
    major: int | None
    codename: str
    name: str


def parse(text: str) -> System:
    """Read the text of an os-release file; unknown fields are ignored, missing ones are empty."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or key.startswith("#"):
            continue
        try:
            fields[key] = "".join(shlex.split(value))
        except ValueError:  # an unclosed quote: take it as it stands
            fields[key] = value
    major = fields.get("VERSION_ID", "").split(".")[0]
    return System(
        id=fields.get("ID", "linux").lower(),
        like=tuple(fields.get("ID_LIKE", "").lower().split()),
        major=int(major) if major.isdecimal() else None,
        codename=fields.get("VERSION_CODENAME", ""),
        name=fields.get("PRETTY_NAME") or fields.get("NAME") or "this system",
    )


def here() -> System:
    """The system we run on."""
    for file in FILES:
        if file.is_file():
            return parse(file.read_text(encoding="utf-8", errors="replace"))
    return parse("")
