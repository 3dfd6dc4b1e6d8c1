"""Writing the tuned directory: FlashInfer's file as FlashInfer saves it, and the manifest beside it, whole.

OUT/<flashinfer-version>/<arch>/<hash>/
    autotune_configs.json     0644
    manifest.json             0644
    engine/…                  0644, for a key that an engine made
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import UsageError
from pipeline.contract.files import alone, write_json
from pipeline.contract.key import Key
from pipeline.contract.manifest import FileFacts, Manifest
from pipeline.contract.places import CACHE_FILE, FAILURE_FILE, MANIFEST_FILE
from pipeline.contract.scratch import scratch

_TRIES = 5
_MAKING = ".making-"  # what the folders are called in which a key is made
_NEW = "new"  # the key in there; under its own name there may be the earlier one, which was in its place


class OutUnusable(UsageError):
    """The directory for the result cannot be written to."""


def open_out(place: Path) -> None:
    """See before anything is tuned that the directory of the result can be made and written to; leave none behind.

    Removes an earlier run's failure. Raises `OutUnusable`.
    """
    try:
        new = not place.exists()
        for left in reversed(range(_TRIES)):
            place.mkdir(parents=True, exist_ok=True)
            try:
                with scratch(place, _MAKING):
                    pass
                (place / FAILURE_FILE).unlink(missing_ok=True)
                break
            except FileNotFoundError:  # another tune that begins now has removed it, as below
                if not left:
                    raise
        if new:
            with contextlib.suppress(OSError):  # another tune is at it
                place.rmdir()
    except OSError as error:
        raise OutUnusable(
            f"{place} cannot be written to: {error.strerror}", hint="name a directory that this user may write"
        ) from error


def file_facts(path: Path) -> FileFacts:
    """Size and sha256 of a file."""
    return FileFacts(path.stat().st_size, sha256_file(path))


def publish(out: Path, key: Key, cache_file: Path, manifest: Manifest, more: Mapping[str, Path] | None = None) -> Path:
    """Put all files in place with one rename, readable by anyone; an earlier directory of the key is replaced.

    `more` maps names below the key's directory to files. FlashInfer saves with mode 0600, which another user in a
    container could not read.
    """
    parent = out / key.flashinfer_version / key.arch
    parent.mkdir(parents=True, exist_ok=True)
    for path in (out, parent.parent, parent):
        with contextlib.suppress(PermissionError):  # a mounted OUT may belong to someone else
            path.chmod(0o755)
    with scratch(parent, _MAKING, _put_back) as work:
        made = work / _NEW
        made.mkdir(mode=0o755)
        for name, source in {CACHE_FILE: cache_file, **(more or {})}.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, made / name)
            (made / name).chmod(0o644)
        for folder in made.rglob("*"):
            if folder.is_dir():
                folder.chmod(0o755)
        write_json(made / MANIFEST_FILE, manifest.to_json())
        made.chmod(0o755)
        _sync(made / CACHE_FILE)
        _sync(made)
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
