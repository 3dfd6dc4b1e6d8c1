"""What the host and the engine keep, and what of it may go: `pipeline clean`, and bounds that every build keeps to.

The store of warm-ups is `pipeline cache prune`'s: an entry there cost hours of a GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import log

from .names import TUNERS
from .session import Session, drop_image, named, remove_leftovers

_DAY = 86_400.0
KEPT_TUNERS = 3  # tuner images
BOUNDS_DAYS = 30.0  # what a build removes by itself was not used for so long
# Folders of the cache home whose entries can be made again without timing anything.
_FOLDERS = ("contexts", "wheels", "modules", "unfinished", "verdicts", "reports", "runs")


@dataclass(frozen=True)
class Item:
    """Something that can go: what it is, where, how large it is (bytes; 0: not counted) and its age in days."""

    what: str
    place: str
    size: int
    days: float

    def line(self) -> str:
        """In one line."""
        size = f", {self.size / 1e6:.1f} MB" if self.size else ""
        return f"{self.what}: {self.place} ({self.days:.1f} days{size})"


def clean(session: Session | None, home: Path, *, days: float, dry_run: bool) -> list[Item]:
    """Remove what was not used for `days`; in the engine (where there is one) also what killed runs left, and all but
    the newest tuner images. Return what went, or with `dry_run` would go.
    """
    found = list(_old(home, days))
    if session is not None:
        found += [Item("left by a killed run", one, 0, 0.0) for one in remove_leftovers(session, dry_run=dry_run)]
        found += list(_tuners(session, days))
    if not dry_run:
        for item in found:
            _remove(session, item)
    return found


def remove_old(session: Session) -> None:
    """What every build does at its end: old contexts, wheels, modules and tuner images go."""
    with contextlib.suppress(OSError):
        gone = clean(session, session.home, days=BOUNDS_DAYS, dry_run=False)
        if gone:
            log.note(f"removed {len(gone)} things that were not used for {BOUNDS_DAYS:.0f} days (`pipeline clean`)")


def _old(home: Path, days: float) -> Iterator[Item]:
    now = time.time()
    for name in _FOLDERS:
        folder = home / name
        if not folder.is_dir() or folder.is_symlink():
            continue
        for place in folder.iterdir():
            with contextlib.suppress(OSError):
                age = (now - place.lstat().st_mtime) / _DAY
                if age > days and place.name != "empty" and not place.name.startswith("."):
                    yield Item(name, str(place), _size(place), age)


def _tuners(session: Session, days: float) -> Iterator[Item]:
    now = time.time()
    images = sorted(session.client.images.list(name=TUNERS), key=lambda image: -named(image.attrs))
    for at, image in enumerate(images):
        age = (now - named(image.attrs)) / _DAY
        if at >= KEPT_TUNERS or age > days:
            for name in image.tags:
                yield Item("tuner image", name, int(image.attrs.get("Size", 0)), age)


def _remove(session: Session | None, item: Item) -> None:
    if item.what == "tuner image":
        assert session is not None, "only an engine has images"
        drop_image(session.client, item.place)
    elif item.what in _FOLDERS:
        place = Path(item.place)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)


def _size(place: Path) -> int:
    if not place.is_dir():
        return place.lstat().st_size
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(place) for name in names)
