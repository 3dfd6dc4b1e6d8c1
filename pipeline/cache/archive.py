"""Caches as tar streams: taking a directory out of one that anyone may have made, and making one.

Only regular files and directories with plain names below the destination are taken. Links, devices, absolute
names, `..`, names that occur twice, sparse files and oversize streams are refused, all of them at once, and then
nothing is left behind. The extraction filters of `tarfile` do not suffice: Python 3.11.0 to 3.11.3 lack them, and they
allow links and names that occur twice.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.contract.errors import CacheRefused
from pipeline.contract.text import shown

from .finding import Finding, lines

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LIMIT = 64 * 1024 * 1024  # bytes of the whole stream, headers included
PUSHED_LIMIT = 2 << 30  # bytes, unpacked, of what `cache push` makes and `cache pull` takes
_MEMBERS = 10_000
_BLOCK = 1 << 20
_PART = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+!@=,~#%() -]{0,254}")


class ArchiveRefused(CacheRefused):
    """An archive contains something that must not be unpacked; every reason is among the details."""


class _Bounded(io.RawIOBase):
    """A readable stream over chunks of bytes that refuses to give more than `limit` bytes."""

    def __init__(self, chunks: Iterable[bytes], limit: int) -> None:
        self._chunks = iter(chunks)
        self._rest = b""
        self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left -= len(chunk)
            if self._left < 0:
                raise _Oversize
            self._rest = chunk
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def chunked(chunks: Iterable[bytes], limit: int = 1 << 40) -> IO[bytes]:
    """Chunks of bytes as a stream that can be read."""
    return io.BufferedReader(_Bounded(chunks, limit), _BLOCK)


class _Oversize(Exception):
    pass


def safe_extract(
    stream: Iterable[bytes] | IO[bytes],
    destination: Path,
    *,
    strip: int = 0,
    limit: int = LIMIT,
    members: int = _MEMBERS,
) -> tuple[Path, ...]:
    """Unpack an uncompressed tar stream into `destination` (made if missing) and return the files, sorted.

    `strip` leaves out that many leading parts of each name: `get_archive("/a/b")` names everything `b/…`. Files get
    mode 0644, or 0755 where the archive lets their owner execute them, and no owner. Raises `ArchiveRefused` with every
    reason, and then `destination` is as it was.
    """
    chunks = iter(lambda: stream.read(_BLOCK), b"") if hasattr(stream, "read") else stream
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        found: list[Finding] = []
        names = _unpack(chunked(chunks, limit), Path(scratch), strip, (limit, members), found)
        clashes = [name for name in names if os.path.lexists(destination / name)]
        found.extend(Finding(shown(name), "exists in the destination already") for name in clashes)
        if found:
            raise ArchiveRefused(
                f"the archive must not be unpacked: {found[0]}",
                hint="make the cache again",
                details=lines(found),
            )
        for name in names:
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / name).replace(target)
        destination.mkdir(exist_ok=True)
    return tuple(sorted(destination / name for name in names))


def _unpack(source: IO[bytes], scratch: Path, strip: int, limits: tuple[int, int], found: list[Finding]) -> list[str]:
    limit, most = limits
    names: list[str] = []
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for count, member in enumerate(archive):
                if count >= most:
                    found.append(Finding("", f"the archive has more than {most} members"))
                    break
                wrong = _wrong(member, seen)
                if wrong:
                    found.append(Finding(shown(member.name), wrong))
                    continue
                parts = _parts(member.name)[strip:]
                if not parts and not member.isdir():
                    found.append(Finding(shown(member.name), "lies above what was asked for"))
                if member.isdir() or found:
                    continue  # once refused, the rest is looked at but not unpacked
                _copy(archive, member, scratch.joinpath(*parts), found)
                names.append("/".join(parts))
    except _Oversize:
        found.append(Finding("", f"the archive is larger than {limit:,} bytes"))
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        found.append(Finding("", f"not a readable tar archive: {shown(str(error))}"))
    return names


def _copy(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, found: list[Finding]) -> None:
    content = archive.extractfile(member)
    assert content is not None  # a regular file has content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as out:
            shutil.copyfileobj(content, out, _BLOCK)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
        if target.stat().st_size != member.size:
            found.append(Finding(shown(member.name), "is cut short"))
    except OSError as error:  # a file where another member has a directory
        found.append(Finding(shown(member.name), f"cannot be written: {error.strerror}"))


def is_plain(name: str) -> bool:
    """Whether every part of a name is one that `safe_extract` takes."""
    return all(_PART.fullmatch(part) for part in _parts(name))


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _wrong(member: tarfile.TarInfo, seen: set[str]) -> str:
    """Why a member must not be unpacked; empty when it may be."""
    parts = _parts(member.name)
    spelled = "/".join(parts)
    reasons = (
        (member.issym() or member.islnk(), f"is a link to {shown(member.linkname)}"),
        (
            not (member.isreg() or member.isdir() or member.issym() or member.islnk()),
            "is neither a file nor a directory",
        ),
        (member.issparse(), "is a sparse file"),
        (member.name.startswith("/"), "is an absolute name"),
        (".." in parts, "leads out of the directory"),
        (not is_plain(member.name), "is not a plain name"),
        (spelled in seen, "occurs twice"),
    )
    seen.add(spelled)
    return ", ".join(what for wrong, what in reasons if wrong)


_EPOCH = 1_577_836_800  # 2020-01-01: any fixed time


def tar_of(root: Path, place: str) -> bytes:
    """A cache root as an uncompressed tar whose names lie below `place`, the same bytes for the same files.

    The whole path from `/`, parents first, so that no parent directory is made anew by whoever unpacks it. Files have
    mode 0644, or 0755 where their owner may execute them. Raises `CacheRefused` where `cache pull` would not take it.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _members(root, place.strip("/")):
            if not is_plain(name):
                raise CacheRefused(f"{path}: `cache pull` takes no such name", hint="remove that file")
            info = tarfile.TarInfo(name)
            info.mtime = _EPOCH
            if path is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                facts = path.stat()
                info.mode, info.size = 0o755 if facts.st_mode & 0o100 else 0o644, facts.st_size
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
            if out.tell() > PUSHED_LIMIT:
                raise CacheRefused(
                    f"{root} is larger than the {PUSHED_LIMIT:,} bytes that `cache pull` takes",
                    hint="push fewer keys (`pipeline cache export`, then remove what is not needed)",
                )
    return out.getvalue()


def _members(root: Path, base: str) -> Iterator[tuple[str, Path | None]]:
    parts = base.split("/")
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth]), None
    for path in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).parts):
        name = f"{base}/{path.relative_to(root)}"
        yield name, None if path.is_dir() else path
