"""What the starts wrote, as caches by kind: packed where the server ran, laid out as it will lie in the image.

FlashInfer's modules leave the workspace: ninja compiles them again when a time changed, and layers keep whole seconds
of times only. They go where FlashInfer looks for modules built ahead of time, and never over one that is there.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.contract.errors import CacheRefused

from . import kinds
from .starts import Start

PACK = "pack.tar"
_MODULE = re.compile(r".*/cached_ops/(?P<name>[^/]+)/(?P=name)\.so")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Laid:
    """What was laid out: kind → (directory in the image, bytes). `others` is of no kind and not among it."""

    places: Mapping[tuple[str, str], int]
    others: Mapping[str, int]
    notes: tuple[str, ...] = ()


def written(starts: Iterable[Start]) -> dict[str, int]:
    """Every file that some start wrote, with its last size."""
    found: dict[str, int] = {}
    for start in starts:
        found.update(start.new)
        found.update(start.changed)
    return found


def pack(starts: Sequence[Start], facts: Mapping[str, Any], target: Path, *, root: str = kinds.ROOT) -> list[str]:
    """Write the files of known kinds, by their names in the image, into a tar file. Returns what is worth saying."""
    found, _ = kinds.sort(written(starts), root)
    notes = []
    aot = str(facts.get("aot") or "")
    with tarfile.open(target, "w") as stream:
        for one in found:
            for path in one.files:
                name = path
                if one.kind == kinds.MODULES:
                    match = _MODULE.fullmatch(path)
                    if match is None:
                        continue
                    name = str(PurePosixPath(aot, match["name"], f"{match['name']}.so"))
                    if not aot or Path(name).exists():
                        notes.append(f"{match['name']} was compiled and is not baked: no place for it")
                        continue
                if Path(path).is_file():
                    stream.add(path, arcname=name.lstrip("/"), recursive=False)
    return notes


def lay(packed: Path, root: Path, starts: Sequence[Start], secrets: Sequence[str], *, top: str = kinds.ROOT) -> Laid:
    """Unpack below `root` with the modes of the image. Raises `CacheRefused` where a secret's value is in a file.

    Below ROOT everybody may write: a server writes beside what it reads, and nobody knows as which user it will run.
    """
    places: dict[tuple[str, str], int] = {}
    with tarfile.open(packed) as stream:
        for member in stream:
            path = "/" + member.name.lstrip("/")
            if not member.isreg() or ".." in PurePosixPath(path).parts:
                continue
            kind, place = kinds.place_of(path, top)
            if kind == kinds.OTHER:
                kind, place = kinds.MODULES, str(PurePosixPath(path).parent.parent)
            source = stream.extractfile(member)
            assert source is not None
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            target.chmod((0o666 if path.startswith(top + "/") else 0o644) | (member.mode & 0o111))
            places[kind, place] = places.get((kind, place), 0) + member.size
    search(root, secrets)
    (root / top.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for folder in (root, *root.rglob("*")):
        if folder.is_dir() and not folder.is_symlink():
            inside = f"/{folder.relative_to(root)}/".startswith(top + "/")
            folder.chmod(0o777 if inside else 0o755)
    return Laid(places, kinds.sort(written(starts), top)[1])


def search(root: Path, secrets: Sequence[str]) -> None:
    """Look for the values of secrets in what would be baked. Raises `CacheRefused`, which names files and no value."""
    wanted = [value.encode() for value in secrets]
    if not wanted:
        return
    longest = max(map(len, wanted))
    found = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and _holds(path, wanted, longest):
            found.append("/" + str(path.relative_to(root)))
    if found:
        raise CacheRefused(
            f"the server wrote the value of a secret into {len(found)} files that would be baked",
            details=found[:20],
            hint="give the secret at run time only: leave it out of SERVER_ARGS and SERVER_ENV",
        )


def _holds(path: Path, wanted: Sequence[bytes], longest: int) -> bool:
    kept = b""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            data = kept + chunk
            if any(value in data for value in wanted):
                return True
            kept = data[-longest:]
    return False
