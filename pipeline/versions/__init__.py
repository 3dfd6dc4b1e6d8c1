"""One source of versions: read it, render from it, compile locks, and prove that nothing disagrees with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.files import write_json
from pipeline.home import cache_home

from .findings import Finding

if TYPE_CHECKING:
    from .source import FILE, SourceInvalid, Versions, load

__all__ = ["FILE", "Finding", "SourceInvalid", "Versions", "load", "values"]


def __getattr__(name: str) -> object:
    """The strict reader, imported where it is used: pydantic is a third of what a repeated build imports."""
    if name not in __all__:
        raise AttributeError(name)
    from . import source

    return getattr(source, name)


def values(root: Path) -> Mapping[str, str]:
    """Names and expanded values of the versions.json below `root`; raise `SourceInvalid` with every problem in it.

    A file that was found valid is known again by its content.
    """
    try:
        data = (root / "versions.json").read_bytes()
    except OSError:
        return _load(root)  # says why not
    known = cache_home() / "contexts" / f"versions-{sha256_bytes(data)[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, str] = json.loads(known.read_text(encoding="utf-8"))
        return found
    found = dict(_load(root))
    with contextlib.suppress(OSError):
        write_json(known, found)
    return found


def _load(root: Path) -> Versions:
    from .source import load

    return load(root)
