"""Putting the result in place, whole: FlashInfer's file as FlashInfer saves it, and the manifest beside it.

    OUT/<flashinfer-version>/<arch>/<hash>/autotune_configs.json, manifest.json     0644

The supervisor does it once every rank has ended well: a rank that ended badly after the last meeting would leave a
cache where every message says that none was saved. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.contract.files import alone, scratch, write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_FILE, FAILURE_FILE, MANIFEST_FILE
from pipeline.contract.record import Key

from .checkpoint import forget
from .failures import NO_ROOM
from .steps import result_path, saved_path, terms_path

_MAKING = ".making-"  # what the folders are called in which a key is made
_NEW = "new"  # the key in there; under its own name there may be the earlier one, which was in its place


class OutUnusable(UsageError):
    """The directory for the result cannot be written to."""


def open_out(place: Path) -> None:
    """Make the directory of the result and see that it can be written to, before anything is tuned.

    Removes an earlier run's failure. Raises `OutUnusable`.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        with scratch(place, _MAKING):
            pass
        (place / FAILURE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise OutUnusable(
            f"{place} cannot be written to: {error.strerror}", hint="name a directory that this user may write"
        ) from error


def finish(out: Path, work: Path, state: Path | None) -> dict[str, object]:
    """Publish below `out` what the ranks left in `work`, and remove what `state` kept; return the result for stdout.

    Raises `OutUnusable`.
    """
    saved = saved_path(work)
    manifest = Manifest.from_json(json.loads(saved.with_name(MANIFEST_FILE).read_bytes()))
    try:
        place = publish(out, Key.parse(manifest.key), saved, manifest)
    except OSError as error:
        kept = "; --state keeps what was tuned" if state is not None else ""
        todo = "free room there" if error.errno in NO_ROOM else "move what is in the way, or name another directory"
        raise OutUnusable(
            f"{error.filename or out} cannot be written to: {error.strerror}", hint=f"nothing was saved{kept}; {todo}"
        ) from error
    forget(state, json.loads(terms_path(work).read_bytes()))
    told: dict[str, object] = json.loads(result_path(work, 0).read_bytes())
    return {"key": told.pop("key"), "path": str(place), **told}


def publish(out: Path, key: Key, cache_file: Path, manifest: Manifest) -> Path:
    """Put both files in place with one rename, readable by anyone; an earlier directory of the key is replaced.

    FlashInfer saves with mode 0600, which another user in a container could not read.
    """
    parent = out / key.flashinfer_version / key.arch
    parent.mkdir(parents=True, exist_ok=True)
    for path in (out, parent.parent, parent):
        with contextlib.suppress(PermissionError):  # a mounted OUT may belong to someone else
            path.chmod(0o755)
    with scratch(parent, _MAKING, _put_back) as work:
        made = work / _NEW
        made.mkdir(mode=0o755)
        made.chmod(0o755)
        shutil.copyfile(cache_file, made / CACHE_FILE)
        (made / CACHE_FILE).chmod(0o644)
        write_json(made / MANIFEST_FILE, manifest.to_json())
        for path in (made / CACHE_FILE, made):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        put_in_place(made, parent / key.hash)
    return parent / key.hash


def put_in_place(made: Path, place: Path) -> None:
    """Rename `made` to `place`, whose earlier content is moved beside `made`; another tune that ends now waits."""
    with alone(place.parent, lambda: None):
        if place.exists():
            place.rename(made.with_name(place.name))
        made.rename(place)


def _put_back(left: Path) -> None:
    """Put the earlier key of a tune that was killed between the two renames back in its place."""
    for one in left.iterdir():
        if one.name != _NEW and not (left.parent / one.name).exists():
            one.rename(left.parent / one.name)
