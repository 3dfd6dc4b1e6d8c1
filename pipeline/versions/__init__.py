"""One source of versions: read it, render from it, and prove that nothing disagrees with it."""

from __future__ import annotations

from pathlib import Path

from .findings import Finding
from .source import FILE, SourceInvalid, Versions, load

__all__ = ["FILE", "Finding", "SourceInvalid", "Versions", "drift", "load"]


def drift(root: Path) -> list[Finding]:
    """Every disagreement with `root`/versions.json, sorted; raise `SourceInvalid` where that file cannot be read."""
    from .check import check

    return check(root).findings
