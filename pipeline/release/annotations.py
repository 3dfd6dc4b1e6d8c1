"""OCI annotations of a released image: its labels, and what may change without changing the image."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.image.names import PREFIX
from pipeline.run import ProcessFailed, ProgramMissing, run

INPUTS = f"{PREFIX}.inputs"  # the inputs digest: the same one is not built or pushed again
GPU = f"{PREFIX}.gpu"  # as a tag shows it
_OCI = "org.opencontainers.image"


def revision_annotations(root: Path) -> dict[str, str]:
    """The checkout's commit (with `-dirty` where files differ from it) and its origin's address without a login."""
    commit = _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    source = public_address(_git(root, "remote", "get-url", "origin"))
    return {name: text for name, text in ((f"{_OCI}.revision", commit), (f"{_OCI}.source", source)) if text}


def public_address(remote: str) -> str:
    """The https address of a git remote, without user and password; empty for a path on this host."""
    match = re.fullmatch(r"(?:[^@/\s]+@)?([^:/\s]+\.[^:/\s]+):(?!//)(\S+)", remote)  # git@host:path
    if match:
        return f"https://{match[1]}/{match[2]}".removesuffix(".git")
    try:
        parts = urlsplit(remote)
    except ValueError:
        return ""
    if parts.scheme not in ("https", "http", "ssh", "git") or not parts.hostname:
        return ""
    return f"https://{parts.hostname}{parts.path}".removesuffix(".git")


def _git(root: Path, *words: str) -> str:
    try:
        return run(["git", "-C", str(root), *words], capture=True, timeout=30).stdout.strip()
    except (ProcessFailed, ProgramMissing):
        return ""
