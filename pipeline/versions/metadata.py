"""What packages themselves require (`Requires-Dist`, `Requires-Python`), held against the pins.

requirements/recorded.json is a copy of what the index said when a version was last moved; `pipeline bump` keeps it.
A tree whose versions.json names no `closures` may do without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .findings import Finding
from .located_json import parse
from .meaning import Meaning, pinned
from .relations import canonical
from .requirements import Pin
from .sites import local_label, same_version
from .source import FILE, Versions
from .texts import Texts
from .tree import Tree, Unreadable

if TYPE_CHECKING:
    from packaging.requirements import Requirement

RECORD = "requirements/recorded.json"
_HINT = "`pipeline bump --refresh` records it"
_NAMED = 3  # packages in one message


class Recorded(NamedTuple):
    """One package's own words: its exact version, the extras that were asked for, and what it requires."""

    version: str
    extras: tuple[str, ...]
    requires_python: str
    requires_dist: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "version": self.version,
            "extras": list(self.extras),
            "requires_python": self.requires_python,
            "requires_dist": list(self.requires_dist),
        }


Record = Mapping[str, Recorded]  # canonical name -> what it requires


def load_record(tree: Tree) -> tuple[Record | None, list[Finding]]:
    """The recorded copy, None where the tree has none, and what is wrong with the file."""
    try:
        text = tree.read(RECORD).decode("utf-8")
    except Unreadable as error:
        missing = error.finding.message == "is missing"
        return None, [] if missing else [error.finding]
    except UnicodeDecodeError:
        return None, [Finding(RECORD, 0, 0, "is not UTF-8", "metadata")]
    document = parse(text)
    if document.problems or document.value is None:
        return None, [Finding(RECORD, *document.place(at), message, "metadata") for at, message in document.problems]
    import json

    found: dict[str, Recorded] = {}
    wrong: list[Finding] = []
    whole = json.loads(text)
    packages = whole.get("packages") if isinstance(whole, dict) else None
    for name, entry in packages.items() if isinstance(packages, dict) else ():
        try:
            found[canonical(name)] = Recorded(
                str(entry["version"]),
                tuple(map(str, entry["extras"])),
                str(entry["requires_python"]),
                tuple(map(str, entry["requires_dist"])),
            )
        except (KeyError, TypeError):
            wrong.append(Finding(RECORD, 0, 0, f"the entry of {name} is not one; {_HINT}", "metadata"))
    return found, wrong


def dump_record(record: Record) -> bytes:
    """The bytes of the recorded copy: sorted, so that a diff shows what changed."""
    import json

    packages = {name: record[name].to_json() for name in sorted(record)}
    comment = "Written by `pipeline bump`: what the index said that each pinned package requires."
    return (json.dumps({"_comment": comment, "packages": packages}, indent=2) + "\n").encode()


def lacking(versions: Versions, pins: Mapping[str, Pin]) -> Finding | None:
    """That there is no recorded copy, where a pin would be held against one.

    With `closures` a tree says that it wants this; elsewhere it is worth a note (`rule` is empty).
    """
    if not pins:
        return None
    names = ", ".join(sorted(pins)[:_NAMED]) + " …" * (len(pins) > _NAMED)
    said = f"is missing, so what {names} require{'s' * (len(pins) == 1)} is not checked; {_HINT}"
    return Finding(RECORD, 0, 0, said, "record" if versions.closures else "")


def governed_pins(versions: Versions, meaning: Meaning) -> dict[str, Pin]:
    """Every distribution that versions.json governs and that a requirements file pins, by canonical name."""
    governors = versions.governors()
    found: dict[str, Pin] = {}
    for requirements in meaning.requirements.values():
        for pin in requirements.pins:
            if pin.name in governors and pinned(pin.specifier) is not None:
                found.setdefault(pin.name or "", pin)
    return found


def check_metadata(versions: Versions, meaning: Meaning, record: Record) -> list[Finding]:
    """Pins that a package's own requirements forbid, and requirements of closures that nothing pins."""
    findings: list[Finding] = []
    python = python_version(versions)
    texts = Texts(versions)
    for path, requirements in meaning.requirements.items():
        pins = {pin.name: pin for pin in requirements.pins if pin.name and pinned(pin.specifier) is not None}
        for name, pin in pins.items():
            if name not in texts.governors:
                continue
            version = pinned(pin.specifier) or ""
            entry = record.get(name)
            if entry is None or not same_version(entry.version, version):
                has = f"has {name} {entry.version}" if entry else f"has no {name}"
                findings.append(Finding(RECORD, 0, 0, f"{has}, {version} is pinned; {_HINT}", "record"))
                continue
            findings += _python(pin, entry, python, versions)
            findings += _labels(pin, entry, texts, pins)
            for requirement in applicable(entry, pin.extras, python):
                wanted = pins.get(canonical(requirement.name))
                if wanted is not None:
                    findings += _one(pin, entry, requirement, wanted, texts)
                elif path in versions.closures and canonical(requirement.name) not in versions.closures[path]:
                    said = f"{name} {entry.version} requires {_spelled(requirement)}, which {path} does not pin"
                    hint = f'pin it, or name it under "closures" in {FILE}'
                    findings.append(Finding(pin.path, pin.line, 0, f"{said}; {hint}", "metadata"))
    return findings


def _python(pin: Pin, entry: Recorded, python: str, versions: Versions) -> Iterator[Finding]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not python or not entry.requires_python:
        return
    try:
        right = SpecifierSet(entry.requires_python).contains(python, prereleases=True)
    except InvalidSpecifier:
        return
    if not right:
        name = versions.governors()["python"]
        said = f"{pin.name} {entry.version} requires Python {entry.requires_python}"
        yield Finding(pin.path, pin.line, 0, f"{said}, {FILE} says {versions[name]} ({name})", "metadata")


def _labels(pin: Pin, entry: Recorded, texts: Texts, pins: Collection[str]) -> Iterator[Finding]:
    """The build that the index gives (`2.13.0+cu130`) and the libraries that it requires (`…-cu13`) fit.

    A library for another CUDA (`…-cu12`) passes where that for this one is pinned beside it: some require both.
    """
    for label in local_label(entry.version).split("."):
        for found in texts.label(label, f"{pin.name} {entry.version}"):
            if found.wrong:
                yield Finding(pin.path, pin.line, 0, found.wrong, "metadata")
    for text in entry.requires_dist:
        required = re.split(r"[\s;]", text, maxsplit=1)[0]
        stem, _, suffix = canonical(re.split(r"[^\w.-]", text, maxsplit=1)[0]).rpartition("-")
        for found in texts.label(suffix, f"{pin.name} {entry.version} requires {required}"):
            if found.wrong and not _beside(stem, pins, texts):
                yield Finding(pin.path, pin.line, 0, found.wrong, "metadata")


def _beside(stem: str, pins: Collection[str], texts: Texts) -> bool:
    """Whether a library of this name is pinned for the version that versions.json names."""
    suffixes = [name.removeprefix(f"{stem}-") for name in pins if name.startswith(f"{stem}-")]
    return any(not found.wrong for suffix in suffixes for found in texts.label(suffix, ""))


def _one(pin: Pin, entry: Recorded, requirement: Requirement, wanted: Pin, texts: Texts) -> Iterator[Finding]:
    version = pinned(wanted.specifier) or ""
    if requirement.specifier.contains(version, prereleases=True):
        return
    governor = texts.governors.get(wanted.name or "")
    said = f"{wanted.name}=={version}, {pin.name} {entry.version} requires {_spelled(requirement)}"
    move = f" (move {governor})" if governor else ""
    yield Finding(wanted.path, wanted.line, 0, said + move, "metadata")


def _spelled(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def applicable(entry: Recorded, extras: tuple[str, ...], python: str) -> Iterator[Requirement]:
    """The requirements that hold on Linux with that Python and those extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    around = environment(python)
    for text in entry.requires_dist:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**around, "extra": extra}) for extra in ("", *extras)):
            yield requirement


def environment(python: str) -> dict[str, str]:
    """The environment of markers: never this machine's, so that a check says the same everywhere."""
    numbers = (python or "3.11").split(".")
    return {
        "implementation_name": "cpython",
        "implementation_version": python,
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": python if len(numbers) > 2 else f"{python or '3.11'}.0",
        "python_version": ".".join(numbers[:2]),
        "sys_platform": "linux",
    }


def python_version(versions: Versions) -> str:
    """The Python that versions.json names, as precisely as it does; empty where it names none."""
    name = versions.governors().get("python")
    if name is None:
        return ""
    exact = next((other for other in versions if versions.relation(other).extends == name), name)
    return versions[exact]
