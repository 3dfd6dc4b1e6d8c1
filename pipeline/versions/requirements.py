"""A reader of requirements files: lines as pip joins them, each requirement as `packaging` understands it."""

from __future__ import annotations

import codecs
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from pipeline.contract.text import without_login

from .findings import Finding

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"(-[a-z]|--[a-z-]+)[\s=]*(.*)")
LARGEST = 4 << 20  # bytes of a file that is read
_DEEPEST = 50  # files that include each other in a row
_ARCHIVE = re.compile(r"\.(whl|zip|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9][-A-Za-z0-9._]*)")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip


class Pin(NamedTuple):
    """One requirement: where it stands, its canonical name (None where only a path is given), and what it asks for.

    `specifier` is the version part as `packaging` prints it; `marker` is None where there is none; `url` is where
    a requirement comes from that names an address or a path.
    """

    path: str
    line: int
    name: str | None
    specifier: str
    marker: str | None = None
    url: str = ""
    hashes: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The version, where this is a pin: one `==` or `===` without a wildcard, beside any `!=`."""
        parts = [part for part in self.specifier.split(",") if not part.startswith("!=")]
        found = re.fullmatch(r"={2,3}\s*([^*\s]+)", parts[0]) if len(parts) == 1 else None
        return found[1] if found else None


class Include(NamedTuple):
    """Another file that one names: by `-r`, or by `-c` as a limit."""

    line: int
    value: str
    limits: bool


@dataclass
class Requirements:
    """All that was read, of one file or of several that include each other."""

    pins: list[Pin] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # includes that were not read
    includes: list[Include] = field(default_factory=list)  # of one file
    read: set[Path] = field(default_factory=set)

    def add(self, found: Pin | Finding) -> None:
        """Add a requirement, or what is wrong with one."""
        if isinstance(found, Pin):
            self.pins.append(found)
        else:
            self.problems.append(found)


def read(
    root: Path, path: str, into: Requirements | None = None, *, inside: bool = True, above: tuple[str, ...] = ()
) -> Requirements:
    """Read a requirements file below `root` and what it includes; `problems` says what is wrong and where.

    `inside` refuses includes that lie outside of `root`; `above` are the files that include this one.
    """
    result = into or Requirements()
    place = root / path
    real = Path(os.path.realpath(place))  # unlike `resolve`, no error for a link in a circle: reading says that
    if real in result.read:
        return result
    result.read.add(real)
    try:
        found = read_text(decode(read_bytes(place)), path)
    except UnicodeError:
        result.problems.append(Finding(path, 0, "is text neither in UTF-8 nor in UTF-16", "pin"))
        return result
    except OSError as error:
        result.problems.append(Finding(path, 0, f"cannot be read: {error.strerror}", "pin"))
        return result
    result.pins += found.pins
    result.problems += found.problems
    for line, value, _ in found.includes:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), value))
        chain = (*above, path)
        if re.match(r"[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
            shown = without_login(value)
            result.notes.append(Finding(path, line, f"includes {shown}, an address, which was not read", "pin"))
        elif target in chain:
            circle = " -> ".join([*chain[chain.index(target) :], target])
            result.problems.append(Finding(path, line, f"includes itself: {circle}", "pin"))
        elif len(chain) > _DEEPEST:
            result.problems.append(Finding(path, line, f"includes {value}, more than {_DEEPEST} files deep", "pin"))
        elif inside and not Path(os.path.realpath(root / target)).is_relative_to(os.path.realpath(root)):
            result.problems.append(Finding(path, line, f"includes {value}, which lies outside the tree", "pin"))
        elif not (root / target).exists():
            result.notes.append(Finding(path, line, f"includes {value}, which is not there", "pin"))
        else:
            read(root, target, result, inside=inside, above=chain)
    return result


def read_text(text: str, path: str) -> Requirements:
    """Read the text of one file; its includes are named and not read."""
    result = Requirements()
    for line, content in logical_lines(text):
        requirement, *options = re.split(r"\s+(?=-)", f" {content}")
        option = _OPTION.match(options[0]) if options else None
        value = option[2].strip("\"'") if option else ""
        if requirement:
            hashes = tuple(one.removeprefix("--hash").strip("= ") for one in options if one.startswith("--hash"))
            result.add(parse(requirement.strip(), path, line, hashes=hashes))
        elif option and option[1] in ("-e", "--editable"):
            result.add(parse(value, path, line))
        elif option and option[1] in ("-r", "--requirement", "-c", "--constraint"):
            result.includes.append(Include(line, value, option[1] in ("-c", "--constraint")))
    return result


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """First line number and text of each requirement or option line; comments are gone, continuations joined."""
    joined: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = _COMMENT.match(line)
        if line.endswith("\\") and not comment:
            first = first or number
            joined.append(line.strip("\\"))
            continue
        whole = "".join([*joined, f" {line}" if comment else line])
        if content := _COMMENT.sub("", whole).strip():
            yield first or number, content
        joined, first = [], 0
    if content := _COMMENT.sub("", "".join(joined)).strip():
        yield first, content


def read_bytes(place: Path) -> bytes:
    """The content of an ordinary file; raise `OSError` with the reason. A FIFO is not waited for."""
    if place.exists() and not place.is_file():
        raise OSError(0, "no ordinary file")
    with place.open("rb") as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(0, "larger than 4 MiB")
    return data


def decode(data: bytes) -> str:
    """Text as its byte order mark says, else UTF-8; raise `UnicodeError`."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode()


def parse(text: str, path: str = "", line: int = 0, *, hashes: tuple[str, ...] = ()) -> Pin | Finding:
    """Understand one requirement; a `Finding` where it is none. pip ends an address that has a marker with `; `."""
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        address, _, condition = text.partition("; ")
        address = address.strip()
        if " " in address or not (re.search(r"://|/|^\.|^file:", address) or _ARCHIVE.search(address)):
            why = str(error).splitlines()[0]
            return Finding(path, line, f"{without_login(text)!r} is not a requirement: {without_login(why)}", "pin")
        try:
            marker = str(Requirement(f"x; {condition}").marker) if condition else None
        except InvalidRequirement:
            return Finding(path, line, f"{condition!r} is not a marker", "pin")
        name, specifier = _of_address(address)
        return Pin(path, line, name, specifier, marker, address, hashes)
    marker = str(found.marker) if found.marker else None
    specifier = str(found.specifier)
    if found.url and not specifier:
        specifier = _of_address(found.url)[1]
    return Pin(path, line, canonicalize_name(found.name), specifier, marker, found.url or "", hashes)


def _of_address(address: str) -> tuple[str | None, str]:
    """Name and version that an address says: by `#egg=`, or by the name of a wheel."""
    egg = _EGG.search(address)
    if egg:
        return canonicalize_name(egg[1]), ""
    try:
        name, version, _, _ = parse_wheel_filename(unquote(address.partition("#")[0].rpartition("/")[2]))
    except InvalidWheelFilename:
        return None, ""
    return str(name), f"=={version}"
