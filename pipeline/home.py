"""Where this tool keeps things on the host, shared by all checkouts of one user; docs/reference/paths.md lists what."""

from __future__ import annotations

import os
from pathlib import Path

from .contract.errors import UsageError


def home() -> Path:
    """The user's own folder. Raises `UsageError` for a user without one, as containers have."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            f"user {os.getuid()} has no home folder: no HOME and no entry in /etc/passwd",
            hint="set HOME to a folder that this user may write",
        ) from error


def cache_home() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, and our folder in it; not created here. Raises `UsageError` without both."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if base.startswith("/") else home() / ".cache"
    return root / "tuned-image-pipeline"
