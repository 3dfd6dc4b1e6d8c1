"""What the starts wrote, as caches by kind: packed where the server ran, laid out as it will lie in the image.

FlashInfer's modules leave the workspace: ninja compiles them again when a time changed, and layers keep whole seconds
of times only. They go where FlashInfer looks for modules built ahead of time, and never over one that is there.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.contract.errors import CacheRefused
from pipeline.contract.files import write_json, write_whole

from . import kinds
from .starts import Start

PACK = "pack.tar"
_MODULE = re.compile(r".*/(?P<arch>[^/]+)/cached_ops/(?P<name>[^/]+)/(?P=name)\.so")
_HOOK = "_pipeline_server_start"
_CHUNK = 1 << 22

Places = dict[tuple[str, str], int]  # (kind, its directory in the image) → bytes


def written(starts: Iterable[Start]) -> tuple[kinds.Sorted, dict[str, int]]:
    """Every file that some start wrote, with its last size, by kind; and those of no kind."""
    found: dict[str, int] = {}
    for start in starts:
        found |= {**start.new, **start.changed}
    return kinds.sort(found)


def pack(starts: Iterable[Start], facts: Mapping[str, Any], target: Path) -> list[str]:
    """Write the files of known kinds, by their names in the image, into a tar file. Returns what is worth saying."""
    notes = []
    aot = str(facts.get("aot") or "")
    with tarfile.open(target, "w") as stream:
        for (kind, _), files in written(starts)[0].items():
            for path in files:
                name = path
                if kind == kinds.MODULES:
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


def lay(packed: Path, root: Path, secrets: Sequence[str]) -> Places:
    """Unpack below `root`. Raises `CacheRefused` where a secret's value is in a file."""
    places: Places = {}
    with tarfile.open(packed) as stream:
        for member in stream:
            path = "/" + member.name.lstrip("/")
            if not member.isreg() or ".." in PurePosixPath(path).parts:
                continue
            kind, place = kinds.place_of(path)
            if kind == kinds.OTHER:  # only modules, which `pack` moved to FlashInfer's own folder
                kind, place = kinds.MODULES, str(PurePosixPath(path).parent.parent)
            source = stream.extractfile(member)
            assert source is not None
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            target.chmod(0o644 | (member.mode & 0o111))
            places[kind, place] = places.get((kind, place), 0) + member.size
    search(root, secrets)
    return places


def install(root: Path, site: str, places: Places, files: kinds.Sorted) -> int:
    """Put `at_start` into the folder of packages `site`, and what it must know of baked modules where it looks.

    `places` is what was laid out below `root`, `files` what the starts wrote. Returns the bytes of `at_start`.
    """
    folder = root / site.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    code = Path(__file__).with_name("at_start.py").read_bytes()
    write_whole(folder / f"{_HOOK}.py", code)
    write_whole(folder / f"{_HOOK}.pth", f"import {_HOOK}\n".encode())
    laid = [root / place.lstrip("/") for kind, place in places if kind == kinds.MODULES]
    compiled = [_MODULE.fullmatch(path) for (kind, _), some in files.items() if kind == kinds.MODULES for path in some]
    arch = next((match["arch"] for match in compiled if match), "")
    if laid:
        names = sorted(module.name for place in laid for module in place.iterdir())
        write_json(root / kinds.MODULES_FILE.lstrip("/"), {"arch": arch, "names": names})
    return len(code)


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
