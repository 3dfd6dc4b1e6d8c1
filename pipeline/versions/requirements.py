"""A reader of requirements files: lines as pip joins them, each requirement as `packaging` understands it."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .findings import Finding
from .relations import canonical
from .tree import Tree, Unreadable, decode

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_COMMENT = re.compile(r"(^|\s+)#.*$")
_INCLUDES = ("-r", "--requirement", "-c", "--constraint")
_DEEPEST = 50  # files that include each other in a row; nobody means more
_ARCHIVE = re.compile(r"\.(whl|zip|tar\.gz|tar\.bz2|tar\.xz|tgz)$")
_EGG = re.compile(r"[#&]egg=([A-Za-z0-9][-A-Za-z0-9._]*)")


class Pin(NamedTuple):
    """One requirement: where it stands, its canonical name (None where only a path is given), and what it asks for.

    `specifier` is the version part as `packaging` prints it; `marker` is None where there is none; `url` is where
    a requirement comes from that names an address or a path; `constraint` says that a `-c` file holds it.
    """

    path: str
    line: int
    name: str | None
    specifier: str
    marker: str | None
    extras: tuple[str, ...] = ()
    url: str = ""
    constraint: bool = False


class Option(NamedTuple):
    """One line of options, split as a shell does."""

    path: str
    line: int
    words: tuple[str, ...]


@dataclass
class Requirements:
    """All that was read, of one file or of several that include each other."""

    pins: list[Pin] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # includes that are not there: pip's business, not a version
    read: set[str] = field(default_factory=set)


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


def read(tree: Tree, path: str, into: Requirements | None = None) -> Requirements:
    """Read a requirements file and what it includes; nothing is raised, `problems` says what is wrong and where."""
    result = into or Requirements()
    _file(tree, path, (), result, constraint=False)
    return result


def _file(tree: Tree, path: str, above: tuple[str, ...], result: Requirements, *, constraint: bool) -> None:
    if path in result.read:
        return
    result.read.add(path)
    try:
        text, bad = decode(tree.read(path))
    except Unreadable as error:
        result.problems.append(error.finding)
        return
    if bad:
        result.problems.append(Finding(path, bad, 0, "is not text in UTF-8, nor in an encoding that it names", "read"))
    for line, content in logical_lines(text):
        words = _options(content)
        if words is None:
            result.problems.append(Finding(path, line, 0, f"a quote is not closed: {content}", "pin"))
        elif content.startswith("-"):
            _option(tree, Option(path, line, words), (*above, path), result)
        else:
            requirement = _without_options(content)
            pin = parse(requirement, path, line, constraint=constraint)
            if isinstance(pin, Pin):
                result.pins.append(pin)
            else:
                result.problems.append(pin)


def _without_options(content: str) -> str:
    """The requirement of a line, without options such as `--hash` behind it."""
    words = content.split(" ")
    end = next((at for at, word in enumerate(words) if word.startswith("-") and at), len(words))
    return " ".join(words[:end]).strip()


def _options(content: str) -> tuple[str, ...] | None:
    start = 0 if content.startswith("-") else len(_without_options(content))
    try:
        return tuple(shlex.split(content[start:]))
    except ValueError:
        return None


def _option(tree: Tree, option: Option, above: tuple[str, ...], result: Requirements) -> None:
    words = option.words
    flag, equals, joined = words[0].partition("=")
    if not equals and flag not in _INCLUDES and flag[:2] in ("-r", "-c", "-e", "-i", "-f") and len(flag) > 2:
        flag, joined, equals = flag[:2], flag[2:], "="
    value = joined if equals else " ".join(words[1:])
    if flag in ("-e", "--editable"):
        pin = parse(value, option.path, option.line, constraint=False)
        if isinstance(pin, Pin):
            result.pins.append(pin)
        return
    result.options.append(option)
    if flag not in _INCLUDES or not value or "://" in value:
        return
    target = posixpath.normpath(posixpath.join(posixpath.dirname(option.path), value))
    place = (option.path, option.line, 0)
    if target in above:
        circle = " -> ".join(map(tree.shown, [*above[above.index(target) :], target]))
        result.problems.append(Finding(*place, f"includes itself: {circle}", "pin"))
    elif target.startswith(("../", "/")) or target == "..":
        result.problems.append(Finding(*place, f"includes {value}, which lies outside the tree", "pin"))
    elif len(above) > _DEEPEST:
        result.problems.append(Finding(*place, f"includes {value}, behind {_DEEPEST} other files", "pin"))
    elif not (tree.root / target).exists() and not (tree.root / target).is_symlink():
        result.notes.append(Finding(*place, f"includes {value}, which is not there", "pin"))
    else:
        _file(tree, target, above, result, constraint=flag in ("-c", "--constraint"))


def parse(text: str, path: str = "", line: int = 0, *, constraint: bool = False) -> Pin | Finding:
    """Understand one requirement; a `Finding` where it is none."""
    from packaging.requirements import InvalidRequirement

    try:
        found = _understood(text)
    except InvalidRequirement as error:
        address = text.partition(";")[0].strip().partition(" ")[0]
        if "://" in address or "/" in address or address.startswith(".") or _ARCHIVE.search(address):
            egg = _EGG.search(address)
            return Pin(path, line, canonical(egg[1]) if egg else None, "", None, (), address, constraint)
        why = str(error).splitlines()[0]
        return Finding(path, line, 0, f"{text!r} is not a requirement: {why}", "pin")
    marker = str(found.marker) if found.marker else None
    extras = tuple(sorted(found.extras))
    return Pin(path, line, canonical(found.name), str(found.specifier), marker, extras, found.url or "", constraint)


@lru_cache(maxsize=4096)  # files share most of their pins
def _understood(text: str) -> Requirement:
    from packaging.requirements import Requirement

    return Requirement(text)
