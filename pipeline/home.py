"""Where this tool keeps things on the host, shared by all checkouts of one user.

<cache home>/tuned-image-pipeline/
    daemon/      the private Docker Engine: data root, configuration, logs, lock
    wheels/      one wheelhouse per requirements file, Python version and platform
    base/        what a bootstrapped base image was made from
    contexts/    staged build contexts of runs in progress
    tuned/       the store: one tuned cache per inputs digest
    verdicts/    verdicts by config digest
    logs/        full logs, newest kept
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, and our folder in it; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "tuned-image-pipeline"
