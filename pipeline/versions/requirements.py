"""A reader of requirements files: lines as pip joins them, each requirement as `packaging` understands it."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from .findings import Finding

_COMMENT = re.compile(r"(^|\s+)#.*$")
_INCLUDES = ("-r", "--requirement", "-c", "--constraint")
_DEEPEST = 50  # files that include each other in a row; nobody means more
_LARGEST = 4 << 20  # bytes
_ARCHIVE = re.compile(r"\.(whl|zip|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9][-A-Za-z0-9._]*)")
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip


class Pin(NamedTuple):
    """One requirement: where it stands, its canonical name (None where only a path is given), and what it asks for.

    `specifier` is the version part as `packaging` prints it; `marker` is None where there is none; `url` is where
    a requirement comes from that names an address or a path; `constraint` says that a `-c` file has it.
    """

    path: str
    line: int
    name: str | None
    specifier: str
    marker: str | None = None
    url: str = ""
    constraint: bool = False
    hashes: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The version, where this is a pin: one `==` or `===` without a wildcard."""
        found = re.fullmatch(r"={2,3}\s*([^,*\s]+)", self.specifier)
        return found[1] if found else None


@dataclass
class Requirements:
    """All that was read, of one file or of several that include each other."""

    pins: list[Pin] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # includes that were not read
    read: set[Path] = field(default_factory=set)


def read(root: Path, path: str, into: Requirements | None = None, *, inside: bool = True) -> Requirements:
    """Read a requirements file below `root` and what it includes; `problems` says what is wrong and where.

    `inside` refuses includes that lie outside of `root`.
    """
    result = into or Requirements()
    _file(root, path, (), result, constraint=False, inside=inside)
    return result


def read_text(text: str, path: str) -> Requirements:
    """Read the text of one file; its includes are passed over."""
    result = Requirements()
    for line, content in logical_lines(text):
        _line(content, path, line, result, constraint=False)
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


def decode(data: bytes) -> str:
    """Text as pip decodes it: by its byte order mark, by a coding comment, else UTF-8; raise `UnicodeError`."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    for line in data.split(b"\n")[:2]:
        found = _CODING.match(line.decode("ascii", "replace"))
        if found:
            try:
                return data.decode(found[1])
            except LookupError as error:
                raise UnicodeError(f"unknown encoding {found[1]}") from error
    return data.decode()


def _file(
    root: Path, path: str, above: tuple[str, ...], result: Requirements, *, constraint: bool, inside: bool
) -> None:
    place = root / path
    if place.resolve() in result.read:
        return
    result.read.add(place.resolve())
    try:
        text = _text(place)
    except UnicodeError:
        result.problems.append(Finding(path, 0, 0, "is not text in UTF-8, nor in an encoding that it names", "pin"))
        return
    except OSError as error:
        result.problems.append(Finding(path, 0, 0, f"cannot be read: {error.strerror}", "pin"))
        return
    for line, content in logical_lines(text):
        included = _line(content, path, line, result, constraint=constraint)
        if included is None:
            continue
        value, limits = included
        target = _joined(path, value)
        at = (path, line, 0)
        if re.match(r"[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
            result.notes.append(Finding(*at, f"includes {value}, an address, which was not read", "pin"))
        elif target in (*above, path):
            chain = [*above, path]
            circle = " -> ".join([*chain[chain.index(target) :], target])
            result.problems.append(Finding(*at, f"includes itself: {circle}", "pin"))
        elif inside and not (root / target).resolve().is_relative_to(root.resolve()):
            result.problems.append(Finding(*at, f"includes {value}, which lies outside the tree", "pin"))
        elif len(above) > _DEEPEST:
            result.problems.append(Finding(*at, f"includes {value}, behind {_DEEPEST} other files", "pin"))
        elif not (root / target).exists():
            result.notes.append(Finding(*at, f"includes {value}, which is not there", "pin"))
        else:
            _file(root, target, (*above, path), result, constraint=constraint or limits, inside=inside)


def _text(place: Path) -> str:
    if not place.is_file():
        raise OSError(0, "no ordinary file" if place.exists() else "no such file")
    if place.stat().st_size > _LARGEST:
        raise OSError(0, "larger than 4 MiB")
    return decode(place.read_bytes())


def _joined(path: str, value: str) -> str:
    import posixpath

    return posixpath.normpath(posixpath.join(posixpath.dirname(path), value))


def _line(content: str, path: str, line: int, result: Requirements, *, constraint: bool) -> tuple[str, bool] | None:
    """Add a requirement or a problem; return what an include names, and whether it is a constraints file."""
    words = content.split(" ")
    end = (
        0 if content.startswith("-") else next((i for i, w in enumerate(words) if w.startswith("-") and i), len(words))
    )
    text = " ".join(words[:end]).strip()
    try:
        rest = " ".join(words[end:])
        options = shlex.split(rest) if "'" in rest or '"' in rest else rest.split()  # shlex is slow; hashes are many
    except ValueError:
        result.problems.append(Finding(path, line, 0, f"a quote is not closed: {content}", "pin"))
        return None
    if text:
        hashes = tuple(option.removeprefix("--hash=") for option in options if option.startswith("--hash="))
        _add(parse(text, path, line, constraint=constraint, hashes=hashes), result)
        return None
    flag, equals, value = options[0].partition("=")
    if not equals and flag[:2] in ("-r", "-c", "-e", "-i", "-f") and len(flag) > 2:
        flag, value = flag[:2], flag[2:]
    value = value or " ".join(options[1:])
    if flag in ("-e", "--editable"):
        _add(parse(value, path, line), result)
    elif flag in _INCLUDES and value:
        return value, flag in ("-c", "--constraint")
    return None


def _add(found: Pin | Finding, result: Requirements) -> None:
    if isinstance(found, Pin):
        result.pins.append(found)
    else:
        result.problems.append(found)


def parse(
    text: str, path: str = "", line: int = 0, *, constraint: bool = False, hashes: tuple[str, ...] = ()
) -> Pin | Finding:
    """Understand one requirement; a `Finding` where it is none. pip ends an address that has a marker with `; `."""
    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        address, _, condition = text.partition("; ")
        address = address.strip()
        if " " in address or not (re.search(r"://|/|^\.|^file:", address) or _ARCHIVE.search(address)):
            why = str(error).splitlines()[0]
            return Finding(path, line, 0, f"{text!r} is not a requirement: {why}", "pin")
        try:
            marker = str(Requirement(f"x; {condition}").marker) if condition else None
        except InvalidRequirement:
            return Finding(path, line, 0, f"{condition!r} is not a marker", "pin")
        name, specifier = _of_address(address)
        return Pin(path, line, name, specifier, marker, address, constraint, hashes)
    marker = str(found.marker) if found.marker else None
    specifier = str(found.specifier)
    if found.url and not specifier:
        specifier = _of_address(found.url)[1]
    return Pin(path, line, canonicalize_name(found.name), specifier, marker, found.url or "", constraint, hashes)


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
