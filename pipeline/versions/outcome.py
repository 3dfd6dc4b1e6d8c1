"""What a bump comes to: its moves and files, the two ways in which it is refused, and the writing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contract.errors import DriftError, UsageError
from pipeline.contract.files import write_whole

from .findings import Finding
from .source import FILE
from .templates import FOLDER


class BumpRefused(UsageError):
    """What was asked for cannot be done; nothing was written."""


class BumpDisagrees(DriftError):
    """The new versions do not agree with each other or with the tree; nothing was written."""

    def __init__(self, findings: Sequence[Finding], *, templates: bool = True) -> None:
        by_hand = (
            f"there is no {FOLDER}/ to render these places from: write the new versions there by hand, then repeat"
        )
        super().__init__(
            "the new versions do not agree; nothing was written",
            hint="name further versions in the same command, or correct what is listed" if templates else by_hand,
            details=[finding.text() for finding in findings],
        )
        self.findings = tuple(findings)


@dataclass(frozen=True)
class Move:
    """One name from one value to another, and why, where nobody asked for it; `old` of a new name is empty."""

    name: str
    old: str
    new: str
    why: str = ""

    def __str__(self) -> str:
        moved = f"{self.name} {self.old} -> {self.new}" if self.old else f"{self.name} {self.new} is new"
        return moved + (f" ({self.why})" if self.why else "")


@dataclass
class Bump:
    """The outcome: moves, the new bytes of every file that changes, and the same as a unified diff."""

    moves: list[Move] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    diff: str = ""
    source: bytes = b""  # versions.json as it was read


def write(root: Path, outcome: Bump) -> None:
    """Write every changed file, each whole; versions.json first, since `versions sync` can follow it from there.

    Only templates that name what it does not name yet come before it, and are put back where it cannot be written.
    """
    if outcome.files and (root / FILE).read_bytes() != outcome.source:
        raise BumpRefused(f"{FILE} was changed in the meantime; nothing was written", hint="repeat the command")
    templates: dict[str, bytes] = {}
    for path in sorted(outcome.files, key=lambda path: (not _is_template(path), path != FILE, path)):
        try:
            if _is_template(path):
                templates[path] = (root / path).read_bytes()
            _write_one(root / path, outcome.files[path])
        except OSError as error:
            rendered = path != FILE and not _is_template(path)
            for before, data in templates.items() if not rendered else ():
                with contextlib.suppress(OSError):
                    _write_one(root / before, data)
            hint = (
                f"{FILE} is written: make this writable, then run `pipeline versions sync`"
                if rendered
                else "make it writable, then repeat the command; nothing was written"
            )
            raise BumpRefused(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def _is_template(path: str) -> bool:
    return path.startswith(f"{FOLDER}/")


def _write_one(path: Path, data: bytes) -> None:
    write_whole(path, data, mode=path.stat().st_mode & 0o777 if path.exists() else 0o644)
