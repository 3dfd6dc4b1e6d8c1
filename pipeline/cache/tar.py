"""A cache root as a tar: the same bytes for the same files, whenever and wherever it is made."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

_EPOCH = 1_577_836_800  # 2020-01-01: any fixed time


def tar_of(root: Path, place: str) -> bytes:
    """A cache root as an uncompressed tar whose names lie below `place`, the same bytes for the same files.

    The whole path from `/`, parents first, so that no parent directory is made anew by whoever unpacks it.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _members(root, place.strip("/")):
            info = tarfile.TarInfo(name)
            info.mtime = _EPOCH
            if path is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                info.mode, info.size = 0o644, path.stat().st_size
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
    return out.getvalue()


def _members(root: Path, base: str) -> Iterator[tuple[str, Path | None]]:
    parts = base.split("/")
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth]), None
    for path in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).parts):
        name = f"{base}/{path.relative_to(root)}"
        yield name, None if path.is_dir() else path
