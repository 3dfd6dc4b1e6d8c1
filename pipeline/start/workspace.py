"""A directory that FlashInfer may write: without one it cannot even be imported.

FlashInfer writes below `$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer`, by default below the home. A user without a
home, or a read-only root, has no such place; then one of our own below a temporary directory is used.
"""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH102, PTH111, PTH112, PTH114, PTH118, PTH120
from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.contract.places import ENV_WORKSPACE

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - places to look for, checked before use


def workspace(environment: Mapping[str, str]) -> tuple[str, str]:
    """The value to export, and what to say about it; both empty where FlashInfer's own choice is writable.

    A directory that allows no execution (docker's `--tmpfs` default) is the last choice: what is compiled there
    could not be loaded.
    """
    set_by_user = environment.get(ENV_WORKSPACE)
    home = set_by_user or environment.get("HOME") or os.path.expanduser("~")
    if writable(os.path.join(home, ".cache", "flashinfer")):
        return "", ""
    if set_by_user:
        return "", f"{ENV_WORKSPACE}={set_by_user} is not writable"
    made = own_directory(environment, "flashinfer")
    if not made:
        return "", f"no directory is writable: set {ENV_WORKSPACE}"
    return made, "what is compiled there cannot be loaded (noexec)" if _no_execution(made) else ""


def own_directory(environment: Mapping[str, str], name: str) -> str:
    """A directory of this user alone below a temporary one, preferring those that allow execution; empty for none."""
    places = [place for place in (environment.get("TMPDIR", ""), *_TEMPORARY) if place and writable(place)]
    for place in sorted(places, key=_no_execution):
        made = _own(os.path.join(place, f"{name}-{os.getuid()}"))
        if made:
            return made
    return ""


def writable(path: str) -> bool:
    """Whether this user may make or fill `path`: asked of the nearest directory above it that exists."""
    while not os.path.lexists(path):
        above = os.path.dirname(path)
        if above == path:
            return False
        path = above
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _no_execution(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return True


def _own(path: str) -> str:
    """Make `path`, or take it when it is this user's alone; a name that another user planted is left alone."""
    for name in (path, f"{path}-{os.getpid()}"):
        try:
            os.mkdir(name, 0o700)
        except FileExistsError:
            facts = os.lstat(name)
            if not os.path.isdir(name) or os.path.islink(name) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
                continue
        except OSError:
            return ""
        return name
    return ""
