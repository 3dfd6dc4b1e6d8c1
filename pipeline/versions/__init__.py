"""One source of versions: read it, render from it, compile locks, and prove that nothing disagrees with it."""

from __future__ import annotations

from .findings import Finding
from .source import FILE, SourceInvalid, Versions, load

__all__ = ["FILE", "Finding", "SourceInvalid", "Versions", "load"]
