"""versions.json: the only place where a version is written.

{
  "variable": {"TORCH_VERSION": {"default": "2.13.0"}, ...},     a buildx bake variable file
  "relations": {"TORCH_VERSION": {"packages": ["torch"]}, ...},  what a name governs beside its own ARG
  "closures": {"requirements/image.txt": ["triton"], ...},       files that pin all that their pins need, but for these
  "unmanaged": ["OS_VERSION", "UCX_*"]                           ARGs named like versions that are none of ours
}

`X_VERSION` governs the distribution `x` (underscores become dashes) unless its relation lists others. A value may
name others, `python:${PYTHON_IMAGE_VERSION}-slim`, as bake itself allows; nothing else in it begins with a `$`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pipeline.contract.errors import UsageError

from .declared import REFERENCE, Variable, declared
from .findings import Finding, counted
from .located_json import parse
from .relations import SUFFIX, Relation
from .tree import Tree, Unreadable

FILE = "versions.json"


class WrittenInvalid(UsageError):
    """Something that people write (`subject`) cannot be used; `findings` lists everything that is wrong with it."""

    subject, remedy = "", ""

    def __init__(self, findings: list[Finding]) -> None:
        one = len(findings) == 1
        message = findings[0].text() if one else f"{self.subject} has {counted(len(findings), 'error')}"
        details = () if one else tuple(finding.text() for finding in findings)
        super().__init__(message, hint=self.remedy, details=details)
        self.findings = findings


class SourceInvalid(WrittenInvalid):
    """versions.json cannot be used."""

    subject, remedy = FILE, f"correct {FILE}, then run `pipeline versions check`"


@dataclass(frozen=True)
class Versions(Mapping[str, str]):
    """Names and values in the order of the file, what each governs, and the file's text."""

    variables: Mapping[str, Variable]
    relations: Mapping[str, Relation]
    closures: Mapping[str, tuple[str, ...]]
    unmanaged: tuple[str, ...]
    text: str = field(repr=False)

    def __getitem__(self, name: str) -> str:
        return self.variables[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def __hash__(self) -> int:
        return hash(self.text)

    def relation(self, name: str) -> Relation:
        """What a name governs; a name without an entry governs the distribution it is named after."""
        return self.relations.get(name) or Relation(name)

    def references(self, name: str) -> tuple[str, ...]:
        """The names that a value is made of."""
        return tuple(REFERENCE.findall(self.variables[name].raw))

    def closure(self, names: Iterable[str]) -> set[str]:
        """Names, and every name that their values are made of or must fit."""
        found: set[str] = set()
        todo = [name for name in names if name in self]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                relation = self.relation(name)
                ties = (*self.references(name), relation.extends, relation.same_as)
                todo += [tied for tied in ties if tied in self]
        return found

    def governors(self) -> Mapping[str, str]:
        """Canonical distribution name -> the name of the variable that governs it."""
        found: dict[str, str] = {}
        for name in self.variables:
            for package in self.relation(name).governs():
                found.setdefault(package, name)
        return found


def load(root: Path) -> Versions:
    """Read `root`/versions.json; raise `SourceInvalid` with every problem in it, each with line and column."""
    try:
        data = Tree(root).read(FILE)
    except Unreadable as error:
        missing = f"there is no {FILE} in {root}"
        message = missing if not os.path.lexists(root / FILE) else error.finding.message
        raise SourceInvalid([Finding(FILE, 0, 0, message, "source")]) from None
    return read(data)


@functools.lru_cache(maxsize=4)
def read(data: bytes) -> Versions:
    """Read the bytes of a versions.json; raise `SourceInvalid` with every problem.

    A release reads the same bytes for each of its cells, and what is read is frozen.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise SourceInvalid([Finding(FILE, line, column, "is not UTF-8 from here on", "source")]) from None
    document = parse(text)
    variables, relations, closures, unmanaged = declared(document)
    if document.problems:
        findings = sorted(Finding(FILE, *document.place(at), message, "source") for at, message in {*document.problems})
        raise SourceInvalid(findings)
    return Versions(
        MappingProxyType(variables),
        MappingProxyType(relations),
        MappingProxyType(closures),
        unmanaged,
        text,
    )


__all__ = ["FILE", "SUFFIX", "SourceInvalid", "Variable", "Versions", "load", "read"]
