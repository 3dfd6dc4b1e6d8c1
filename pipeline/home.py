"""Where this tool keeps things on the host, shared by all checkouts of one user; docs/reference/paths.md lists what."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, and our folder in it; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "tuned-image-pipeline"
