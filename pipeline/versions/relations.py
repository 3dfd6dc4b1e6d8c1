"""What a name governs beside its own ARG: data of versions.json, read and typed here, used by every check."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

from .findings import near
from .located_json import Member, Value

SUFFIX = "_VERSION"
PLACE = re.compile(r"\{(major|minor|micro)\}")  # where a number of a version goes in a `local_label`


@dataclass(frozen=True)
class Relation:
    """One name's entry under `relations`; None or empty where the file says nothing.

    packages      distributions whose pins carry this version
    images        image repositories whose tag begins with this version
    repositories  last parts of git or download addresses (default: the packages) that name this version
    git_ref       how a tag of those repositories spells it, `v{}`
    local_label   spellings of this version in labels, `cu{major}{minor}`
    extends       another name, whose value this one begins with (3.11.14 extends 3.11)
    same_as       another name, whose value this one equals
    """

    name: str
    packages: tuple[str, ...] | None = None
    images: tuple[str, ...] = ()
    repositories: tuple[str, ...] | None = None
    git_ref: str = ""
    local_label: tuple[str, ...] = ()
    extends: str = ""
    same_as: str = ""

    def governs(self) -> tuple[str, ...]:
        """Canonical names of the distributions that carry this version."""
        if self.packages is not None:
            return self.packages
        if self.name.upper().endswith(SUFFIX) and len(self.name) > len(SUFFIX):
            return (canonical(self.name[: -len(SUFFIX)]),)
        return ()


_LISTS = ("packages", "images", "repositories", "local_label")
_KEYS = tuple(field.name for field in fields(Relation) if field.name != "name")


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """A distribution's name as indexes compare it: lower case, runs of `-`, `_`, `.` are one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_relation(name: str, members: tuple[Member, ...], wrong: Callable[[int, str], None]) -> Relation:
    """Type one entry of `relations`; everything that does not fit goes to `wrong(offset, message)`."""
    found: dict[str, str | tuple[str, ...]] = {}
    for member in members:
        if member.name not in _KEYS:
            wrong(member.start, f'unknown key "{member.name}" in the relation of "{name}"{near(member.name, _KEYS)}')
            continue
        words = texts(member.value)
        if words is None or (member.name not in _LISTS and len(words) != 1):
            kind = "a list of strings" if member.name in _LISTS else "a string"
            wrong(member.value.start, f'"{member.name}" of "{name}" must be {kind}')
        elif member.name == "packages":
            found["packages"] = tuple(canonical(text) for text in words)
        else:
            found[member.name] = words if member.name in _LISTS else words[0]
    ref = str(found.get("git_ref", "{}"))
    if ref.count("{}") != 1:
        at = next(member.value.start for member in members if member.name == "git_ref")
        wrong(at, f'"git_ref" of "{name}" must hold {{}} once, where the version goes')
    for label in found.get("local_label", ()):
        if re.search(r"[{}]", PLACE.sub("", label)):
            at = next(member.value.start for member in members if member.name == "local_label")
            wrong(at, f'"local_label" of "{name}" may hold {{major}}, {{minor}}, {{micro}} only')
    return Relation(name, **found)  # type: ignore[arg-type]


def texts(value: Value) -> tuple[str, ...] | None:
    """A string, or a list of strings, as a tuple; None for anything else."""
    if isinstance(value.data, str):
        return (value.data,)
    if value.members is None and isinstance(value.data, tuple):
        words = tuple(item.data for item in value.data if isinstance(item, Value))
        if all(isinstance(text, str) for text in words):
            return tuple(str(text) for text in words)
    return None
