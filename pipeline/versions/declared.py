"""A parsed versions.json taken apart: variables with references followed, relations, closures; every slip is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .findings import near
from .located_json import Document, Member, Value
from .relations import Relation, canonical, read_relation, texts

_TOP = ("variable", "relations", "closures", "unmanaged", "_comment")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_LONGEST = 4096  # characters of a value; names that name others twice each double it every time
_DEEPEST = 50  # names behind each other
_FOLLOWED = 10_000  # names that lead back, each by several ways, would be followed for ever
_PLAIN = re.compile(r"\d+(?:\.\d+)*(?:\.post\d+)?")  # surely a version (PEP 440), without a slow import
_UNSAFE = re.compile(r"[\x00-\x1f\x7f$\\\"'`]|^\s|\s$")


class Variable(NamedTuple):
    """One name, its value with references followed and as written, the line of the name, the value's range of
    characters in the file (quotes included)."""

    name: str
    value: str
    raw: str
    line: int
    start: int
    end: int


_Parts = tuple[dict[str, Variable], dict[str, Relation], dict[str, tuple[str, ...]], tuple[str, ...]]


def declared(document: Document) -> _Parts:
    """Variables, relations, closures and unmanaged names; what is wrong is added to the document's problems."""
    return _Walk(document).everything()


class _Walk:
    """Takes a parsed document apart and adds to its problems."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.whole: dict[str, str] = {}  # values that name nothing any more
        self.followed = 0

    def wrong(self, at: int, message: str) -> None:
        self.document.problems.append((at, message))

    def everything(self) -> _Parts:
        top = self.document.value
        if top is None:
            return {}, {}, {}, ()
        if top.members is None:
            self.wrong(top.start, "the document must be an object")
            return {}, {}, {}, ()
        parts: dict[str, Member] = {}
        for member in top.members:
            parts.setdefault(member.name, member)
            if member.name not in _TOP:
                self.wrong(member.start, f'unknown key "{member.name}"{near(member.name, _TOP)}')
        if "variable" not in parts:
            self.wrong(top.start, 'there is no "variable"')
        variables = self.variables(parts["variable"].value) if "variable" in parts else {}
        relations = self.relations(parts["relations"].value, variables) if "relations" in parts else {}
        closures = self.closures(parts["closures"].value) if "closures" in parts else {}
        unmanaged = self.names(parts["unmanaged"].value) if "unmanaged" in parts else ()
        return variables, relations, closures, unmanaged

    def names(self, value: Value) -> tuple[str, ...]:
        found = None if isinstance(value.data, str) else texts(value)
        if found is None:
            self.wrong(value.start, '"unmanaged" must be a list of names')
        return found or ()

    def closures(self, value: Value) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for member in self.members(value, '"closures"'):
            names = texts(member.value)
            if names is None or isinstance(member.value.data, str):
                self.wrong(member.value.start, f'"{member.name}" must be a list of distributions')
            else:
                found[member.name] = tuple(canonical(name) for name in names)
        return found

    def members(self, value: Value, what: str) -> tuple[Member, ...]:
        if value.members is None:
            self.wrong(value.start, f"{what} must be an object")
            return ()
        return value.members

    def variables(self, value: Value) -> dict[str, Variable]:
        found: dict[str, Variable] = {}
        for member in self.members(value, '"variable"'):
            if not _NAME.fullmatch(member.name):
                self.wrong(member.start, f'"{member.name}" is not a name that an ARG can have')
            default = self.default(member)
            if default is not None and member.name not in found:
                line, _ = self.document.place(member.start)
                raw = str(default.data)
                found[member.name] = Variable(member.name, raw, raw, line, default.start, default.end)
        return {name: self.expanded(variable, found, ()) for name, variable in found.items()}

    def expanded(self, variable: Variable, known: Mapping[str, Variable], above: tuple[str, ...]) -> Variable:
        """A variable with the names in its value followed; a name that is unknown or leads back is a problem."""

        def follow(match: re.Match[str]) -> str:
            name = match[1]
            if name in self.whole:
                return self.whole[name]
            new = name in known and name not in (*above, variable.name)
            if new and (len(above) > _DEEPEST or self.followed > _FOLLOWED):
                self.wrong(variable.start, f'"{variable.name}" stands behind too many other names')
                return match[0]
            if new:
                self.followed += 1
                return self.expanded(known[name], known, (*above, variable.name)).value
            whole = (*above, variable.name)
            if above and name == whole[0]:
                first = known[name]
                self.wrong(first.start, f'"{name}" names ${{{whole[1]}}}, which leads back to it')
            elif not above:
                why = f"which has no version{near(name, known)}" if name not in known else "which leads back to it"
                self.wrong(variable.start, f'"{variable.name}" names ${{{name}}}, {why}')
            return match[0]

        value = REFERENCE.sub(follow, variable.raw)
        if len(value) > _LONGEST:
            self.wrong(variable.start, f'the value of "{variable.name}" has more than {_LONGEST} characters')
            value = variable.raw[:_LONGEST]
        if "$" not in value:
            self.whole[variable.name] = value
        return variable._replace(value=value)

    def default(self, member: Member) -> Value | None:
        found = None
        for entry in self.members(member.value, f'"{member.name}"'):
            if entry.name != "default":
                self.wrong(
                    entry.start, f'unknown key "{entry.name}" in "{member.name}"{near(entry.name, ("default",))}'
                )
            elif not isinstance(entry.value.data, str):
                self.wrong(entry.value.start, f'the value of "{member.name}" must be a string in double quotes')
            elif not entry.value.data:
                self.wrong(entry.value.start, f'the value of "{member.name}" is empty')
            elif _UNSAFE.search(REFERENCE.sub("", entry.value.data)):
                self.wrong(
                    entry.value.start, f'the value of "{member.name}" has a quote, $, \\, a control or an outer space'
                )
            else:
                found = found or entry.value
        if member.value.members is not None and not any(e.name == "default" for e in member.value.members):
            self.wrong(member.start, f'"{member.name}" has no "default"')
        return found

    def relations(self, value: Value, variables: Mapping[str, Variable]) -> dict[str, Relation]:
        found: dict[str, Relation] = {}
        for member in self.members(value, '"relations"'):
            if member.name not in variables:
                self.wrong(
                    member.start, f'relation of "{member.name}", which has no version{near(member.name, variables)}'
                )
            relation = read_relation(member.name, self.members(member.value, f'"{member.name}"'), self.wrong)
            found.setdefault(member.name, relation)
            for other in (relation.extends, relation.same_as):
                if other and (other not in variables or other == member.name):
                    self.wrong(member.start, f'"{member.name}" is tied to "{other}", which is no other name here')
            variable = variables.get(member.name)
            if variable is not None and (relation.packages or relation.local_label):
                self.pep440(variable, "it governs packages" if relation.packages else "a label is made of it")
        taken: dict[str, str] = {}
        for name, relation in found.items():
            for package in relation.packages or ():
                if package in taken and taken[package] != name:
                    at = next(m.start for m in self.members(value, "") if m.name == name)
                    self.wrong(at, f'"{package}" is governed by both "{taken[package]}" and "{name}"')
                taken.setdefault(package, name)
        return found

    def pep440(self, variable: Variable, why: str) -> None:
        if _PLAIN.fullmatch(variable.value):
            return
        from packaging.version import InvalidVersion, Version

        try:
            Version(variable.value)
        except InvalidVersion:
            self.wrong(variable.start, f'"{variable.value}" of "{variable.name}" is not a version (PEP 440), and {why}')
            return
        if variable.value[0] in "vV":  # pip would take it; an ARG, a tag and what is installed would not be it
            plain = variable.value[1:]
            self.wrong(variable.start, f'"{variable.value}" of "{variable.name}" is a tag: write "{plain}", for {why}')
