"""Reading a tree that one does not trust: links out of it, files that vanish, bytes that are no text."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from .findings import Finding

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark begins it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CODING = re.compile(rb"coding[:=]\s*([-\w.]+)")


_DOCKERFILE = re.compile(r"(?:^|\.)(?:dockerfile|containerfile)(?:$|[.-])", re.IGNORECASE)


def is_dockerfile(name: str) -> bool:
    """Whether a file's name says that it is one: `Dockerfile`, `Dockerfile.gpu`, `gpu.Dockerfile`."""
    return _DOCKERFILE.search(name) is not None


class NotOrdinary(OSError):
    """A FIFO, a socket or a device: opening one may block for ever, reading one may never end."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EINVAL, "is no ordinary file", os.fspath(path))


def ordinary(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path itself where opening it cannot block; raise `NotOrdinary`, or what the system says of it."""
    mode = os.stat(path).st_mode  # noqa: PTH116 -- paths are text in the inner loop of an audit
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a folder the system says what it is
        raise NotOrdinary(path)
    return path


def refusal(error: OSError) -> str:
    """Why a file cannot be read, as a finding says it."""
    return str(error.strerror) if isinstance(error, NotOrdinary) else f"cannot be read: {error.strerror}"


class Unreadable(Exception):
    """A file cannot be read; `finding` says which and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.finding = Finding(path, 0, 0, why, "read")


class Tree:
    """The files below a root; paths are relative to it, with slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root.resolve()

    def shown(self, path: str) -> str:
        """A path as messages spell it."""
        return path

    def read(self, path: str) -> bytes:
        """The bytes of a file; raise `Unreadable` for a link out of the tree and whatever the system refuses."""
        full = self.root / path
        try:
            real = full.resolve(strict=True)
            if not real.is_relative_to(self.home):
                raise Unreadable(path, "is a link out of the tree; it is not read")
            return Path(ordinary(real)).read_bytes()
        except FileNotFoundError:
            gone = "is a link to nothing" if full.is_symlink() else "is missing"
            raise Unreadable(path, gone) from None
        except RuntimeError:  # Python 3.11 and 3.12 say so of links in a circle
            raise Unreadable(path, "is a link in a circle") from None
        except OSError as error:
            raise Unreadable(path, refusal(error)) from None

    def walk(self, folder: str, findings: list[Finding]) -> Iterator[str]:
        """Every file below a folder, sorted; links to folders are not followed, those out of the tree are findings."""

        def refused(error: OSError) -> None:
            path = Path(str(error.filename or folder))
            shown = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
            findings.append(Finding(shown, 0, 0, f"cannot be read: {error.strerror}", "read"))

        start = self.root / folder
        if start.is_symlink() and not start.resolve().is_relative_to(self.home):
            findings.append(Finding(folder, 0, 0, "is a link out of the tree; it is not read", "read"))
            return
        for here, folders, files in os.walk(start, onerror=refused):
            folders.sort()
            inside = Path(here).relative_to(self.root)
            for name in folders:
                link = Path(here, name)
                if link.is_symlink() and not link.resolve().is_relative_to(self.home):
                    path = (inside / name).as_posix()
                    findings.append(Finding(path, 0, 0, "is a link out of the tree; it is not read", "read"))
            yield from ((inside / name).as_posix() for name in sorted(files))


class Overlay(Tree):
    """A tree as it would be with some files written."""

    def __init__(self, root: Path, files: Mapping[str, bytes]) -> None:
        super().__init__(root)
        self.files = files

    def read(self, path: str) -> bytes:
        """The new bytes of a file where there are any, else those that it has."""
        return self.files[path] if path in self.files else super().read(path)

    def walk(self, folder: str, findings: list[Finding]) -> Iterator[str]:
        """The files that are there, and those that would be."""
        seen = set(super().walk(folder, findings)) if (self.root / folder).exists() else set()
        yield from sorted(seen | {path for path in self.files if path.startswith(f"{folder}/")})


def decode(data: bytes) -> tuple[str, int]:
    """Text of a file by its byte order mark, its coding comment, else UTF-8; and the line of the first bad byte or 0.

    Bad bytes become U+FFFD, so that the rest is still read.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    if not encoding:
        for line in data.split(b"\n", 2)[:2]:
            found = _CODING.search(line) if line.lstrip().startswith(b"#") else None
            if found:
                encoding = found[1].decode("ascii", "replace")
                break
    try:
        codecs.lookup(encoding)
    except (LookupError, ValueError):
        encoding = "utf-8"
    try:
        return data.decode(encoding or "utf-8"), 0
    except UnicodeDecodeError as error:
        bad = data.count(b"\n", 0, error.start) + 1
    except (LookupError, ValueError):  # a codec that is not for text
        return data.decode("utf-8", "replace"), 1
    try:
        return data.decode(encoding or "utf-8", "replace"), bad
    except ValueError:  # some codecs refuse bad bytes whatever they are told (idna)
        return data.decode("utf-8", "replace"), bad
