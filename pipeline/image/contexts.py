"""Named build contexts, staged on disk: the same content gives the same bytes, times and modes, hence the same layer.

A context that becomes a layer holds the whole path from `/`, so that no parent directory is made anew by the builder
(such a directory carries the time of the build and changes the layer's digest).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.contract.files import write_json
from pipeline.contract.places import CACHE_ROOT, PLAN_FILE
from pipeline.contract.plan import Plan

# Every staged file carries this time (2020-01-01): any fixed one would do, but zip-based tools dislike 1970.
FIXED_TIME = 1_577_836_800

# What of our code runs inside the image, relative to the package; standard library, torch and FlashInfer only.
SHIPPED_MODULES = ("__init__.py", "log.py", "run.py")
SHIPPED_ROOMS = ("contract", "cache", "tune")


def settle(root: Path) -> Path:
    """Give everything below `root` fixed times and modes (0755 directories, 0644 or 0755 files); return `root`."""
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            path = Path(folder) / name
            if path.is_symlink():
                continue
            executable = path.is_dir() or (os.access(path, os.X_OK) and path.stat().st_mode & 0o100)
            path.chmod(0o755 if executable else 0o644)
            os.utime(path, (FIXED_TIME, FIXED_TIME))
    root.chmod(0o755)
    os.utime(root, (FIXED_TIME, FIXED_TIME))
    return root


def stage_code(package: Path, place: Path) -> Path:
    """Copy the rooms that run in the image to `place/pipeline`, without caches of byte code."""
    target = place / "pipeline"
    target.mkdir(parents=True)
    for name in SHIPPED_MODULES:
        shutil.copyfile(package / name, target / name)
    for room in SHIPPED_ROOMS:
        shutil.copytree(package / room, target / room, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    return settle(place)


def stage_plan(plan: Plan, place: Path) -> Path:
    """Write plan.json into `place`."""
    place.mkdir(parents=True)
    write_json(place / PLAN_FILE, plan.to_json())
    return settle(place)


def stage_previous(previous: Path | None, place: Path) -> Path:
    """Copy an earlier cache root to `place`; an empty folder when there is none (the stage mounts it either way)."""
    if previous is None:
        place.mkdir(parents=True)
    else:
        shutil.copytree(previous, place)
    return settle(place)


def stage_tuned(tree: Path, place: Path) -> Path:
    """Copy a cache root to its whole path below `place`: the context that replaces the stage `tuned`."""
    shutil.copytree(tree, place / CACHE_ROOT.lstrip("/"))
    return settle(place)
