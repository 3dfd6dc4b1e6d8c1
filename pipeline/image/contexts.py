"""Named build contexts, staged on disk: the same content gives the same bytes, times and modes, hence the same layer.

A context that becomes a layer holds the whole path from `/`, so that no parent directory is made anew by the builder
(such a directory carries the time of the build and changes the layer's digest).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

from pipeline.contract.digest import sha256_bytes, sha256_file, sha256_json
from pipeline.contract.files import write_json
from pipeline.contract.places import CACHE_ROOT, CODE_ROOT, PLAN_FILE, TUNING_ROOT
from pipeline.contract.plan import Plan

# The image's own dates are this (2020-01-01): any fixed time would do, but zip dislikes 1970.
FIXED_TIME = 1_577_836_800
# What is staged carries a time within the four years after it, chosen by its content: files by their bytes, directories
# by all that lies in them. BuildKit synchronises a local context by path, size, mode and time into a folder that it
# kept from an earlier build. With one time for everything it baked the old bytes of a file of the same size, and
# left "now" on a directory in which something else had changed (both seen). One time per content is as reproducible.
_SPREAD = 1 << 27
STAGING = 4  # raise when staging itself changes, so that contexts staged earlier are not taken

ENTRY_POINT = "pipeline-run"

# What of our code runs inside the image, relative to the package; standard library, torch and FlashInfer only.
SHIPPED_MODULES = ("__init__.py", "log.py", "run.py")
SHIPPED_ROOMS = ("contract", "flashinfer", "cache", "start", "tune")


def settle(root: Path) -> Path:
    """Give everything below `root` times that its content decides, and plain modes; return `root`.

    Directories become 0755, files 0644, or 0755 when their owner may execute them.
    """
    times: dict[str, int] = {}
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            _settle_one(Path(folder) / name, times)
    _settle_one(root, times)
    return root


def _settle_one(path: Path, times: dict[str, int]) -> None:
    """Settle one file, link or directory whose inside is settled; `times` holds what was given to each path so far."""
    if path.is_symlink():
        content = sha256_bytes(os.fsencode(path.readlink()))
    elif path.is_dir():
        content = sha256_json(sorted((child.name, times[str(child)]) for child in path.iterdir()))
        path.chmod(0o755)
    else:
        content = sha256_file(path)
        path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    when = times[str(path)] = FIXED_TIME + int(content[:8], 16) % _SPREAD
    os.utime(path, (when, when), follow_symlinks=False)


def stage_code(package: Path, place: Path) -> Path:
    """Copy the rooms that run in the image to their whole path below `place`, without caches of byte code."""
    code = place / CODE_ROOT.lstrip("/")
    target = code / "pipeline"
    target.mkdir(parents=True)
    for name in SHIPPED_MODULES:
        shutil.copyfile(package / name, target / name)
    for room in SHIPPED_ROOMS:
        shutil.copytree(package / room, target / room, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (code / "bin").mkdir()
    (code / "bin" / ENTRY_POINT).symlink_to(f"../pipeline/start/{ENTRY_POINT}")
    return settle(place)


def stage_plan(plan: Plan, place: Path) -> Path:
    """Write plan.json to its whole path below `place`."""
    home = place / TUNING_ROOT.lstrip("/")
    home.mkdir(parents=True)
    write_json(home / PLAN_FILE, plan.to_json())
    return settle(place)


def stage_previous(previous: Path | None, place: Path) -> Path:
    """Copy an earlier cache root to `place`; an empty folder when there is none (the stage mounts it either way)."""
    if previous is None:
        place.mkdir(parents=True)
    else:
        shutil.copytree(previous, place)
    return settle(place)


def stage_modules(root: Path, place: Path) -> Path:
    """Copy compiled modules, which lie at their whole path already."""
    shutil.copytree(root, place)
    return settle(place)


class HasPlace(Protocol):
    """A key's directory that can be copied to its place below a cache root."""

    def copy_below(self, root: Path) -> None:
        """Copy it."""


def stage_key(key: HasPlace, place: Path) -> Path:
    """Copy one key to its whole path below `place`: the context that becomes its layer."""
    key.copy_below(place / CACHE_ROOT.lstrip("/"))
    return settle(place)
