"""What new versions require and nothing pins yet: further names of versions.json, each with a line in a template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .meaning import Meaning, pinned
from .metadata import applicable
from .recorded import Recorded
from .relations import SUFFIX, canonical
from .requirements import Pin
from .source import Versions, read
from .templates import END, FOLDER

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


class Addition(NamedTuple):
    """A distribution that a requirements file lacks: with which extras, in what range, which other is `asking`, why."""

    path: str
    package: str
    extras: tuple[str, ...]
    allowed: tuple[SpecifierSet, ...]
    asking: str
    why: str

    @property
    def name(self) -> str:
        """The name that governs the distribution without a relation."""
        return self.package.upper().replace("-", "_") + SUFFIX

    @property
    def template(self) -> str:
        """The template of the requirements file."""
        return f"{FOLDER}/{self.path}{END}"

    def line(self, name: str) -> str:
        """The pin, as a template has it."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.package}{extras}=={{{{ {name} }}}}  # {self.asking} requires it\n"

    def pin(self, version: str) -> Pin:
        """The pin, as it will be read."""
        return Pin(self.path, 0, self.package, f"=={version}", None, self.extras)


def additions(versions: Versions, meaning: Meaning, record: Mapping[str, Recorded], python: str) -> list[Addition]:
    """What files that must pin all that their pins require do not pin, each distribution once per file."""
    governors = versions.governors()
    found: dict[tuple[str, str], Addition] = {}
    for path, excused in versions.closures.items():
        read_there = meaning.requirements[path].pins if path in meaning.requirements else ()
        pins = {pin.name: pin for pin in read_there if pin.name is not None}
        for name, pin in pins.items():
            if name not in governors or name not in record or pinned(pin.specifier) is None:
                continue
            for one in applicable(record[name], pin.extras, python):
                package = canonical(one.name)
                if package in pins or package in excused:
                    continue
                why = f"{name} {record[name].version} requires {one.name}{one.specifier}"
                new = Addition(path, package, tuple(sorted(one.extras)), (one.specifier,), name, why)
                known = found.setdefault((path, package), new)
                if known is not new:
                    extras = tuple(sorted({*known.extras, *new.extras}))
                    found[path, package] = known._replace(extras=extras, allowed=known.allowed + new.allowed)
    return list(found.values())


def edited(versions: Versions, values: Mapping[str, str], new: Mapping[str, tuple[str, str]]) -> Versions:
    """versions.json with other values, and with `new` names, each `(value, the name that it stands behind)`.

    Order and layout of what is there stay.
    """
    text = versions.text
    edits = [
        (versions.variables[name].start, versions.variables[name].end, json.dumps(values[name])) for name in values
    ]
    for name, (value, behind) in new.items():
        at = text.index("}", versions.variables[behind].end) + 1
        line = text[text.rfind("\n", 0, versions.variables[behind].start) + 1 : at]
        indent = line[: len(line) - len(line.lstrip())]
        apart = f"\n{indent}" if line.lstrip().startswith(f'"{behind}"') else " "
        edits.append((at, at, f',{apart}{json.dumps(name)}: {{"default": {json.dumps(value)}}}'))
    for start, end, written in sorted(edits, reverse=True):
        text = text[:start] + written + text[end:]
    return read(text.encode())
