"""What packages themselves require (`Requires-Dist`, `Requires-Python`), held against the pins.

A tree whose versions.json names no `closures` may do without the recorded copy (recorded.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from .findings import Finding
from .meaning import Meaning, pinned
from .recorded import HINT, RECORD, Record, Recorded
from .relations import canonical
from .requirements import Pin
from .sites import local_label, same_version
from .source import FILE, Versions
from .texts import Texts

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_NAMED = 3  # packages in one message
_DISTRIBUTION = re.compile(r"\s*[A-Za-z0-9][\w.-]*")


def lacking(versions: Versions, pins: Mapping[str, Pin]) -> Finding | None:
    """That there is no recorded copy, where a pin would be held against one.

    With `closures` a tree says that it wants this; elsewhere it is worth a note (`rule` is empty).
    """
    if not pins:
        return None
    names = ", ".join(sorted(pins)[:_NAMED]) + " …" * (len(pins) > _NAMED)
    said = f"is missing, so what {names} require{'s' * (len(pins) == 1)} is not checked; {HINT}"
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
    texts = meaning.texts
    for path, requirements in meaning.requirements.items():
        pins = {pin.name: pin for pin in requirements.pins if pin.name and pinned(pin.specifier) is not None}
        for name, pin in pins.items():
            if name not in texts.governors:
                continue
            version = pinned(pin.specifier) or ""
            entry = record.get(name)
            if entry is None or not same_version(entry.version, version):
                has = f"has {name} {entry.version}" if entry else f"has no {name}"
                findings.append(Finding(RECORD, 0, 0, f"{has}, {version} is pinned; {HINT}", "record"))
                continue
            findings += _python(pin, entry, python, versions)
            findings += _labels(pin, entry, texts, pins)
            excused = versions.closures.get(path)

            def concerns(name: str, pins: Container[str] = pins, excused: Container[str] | None = excused) -> bool:
                return name in pins or (excused is not None and name not in excused)

            for requirement in applicable(entry, pin.extras, python, concerns):
                wanted = pins.get(canonical(requirement.name))
                if wanted is not None:
                    findings += _one(pin, entry, requirement, wanted, texts)
                else:
                    said = f"{name} {entry.version} requires {_spelled(requirement)}, which {path} does not pin"
                    hint = f'pin it, or name it under "closures" in {FILE}'
                    findings.append(Finding(pin.path, pin.line, 0, f"{said}; {hint}", "metadata"))
    return findings


def _python(pin: Pin, entry: Recorded, python: str, versions: Versions) -> Iterator[Finding]:
    if python and entry.requires_python and not _runs_on(entry.requires_python, python):
        name = versions.governors()["python"]
        said = f"{pin.name} {entry.version} requires Python {entry.requires_python}"
        yield Finding(pin.path, pin.line, 0, f"{said}, {FILE} says {versions[name]} ({name})", "metadata")


@lru_cache(maxsize=256)
def _runs_on(requires_python: str, python: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(requires_python).contains(python, prereleases=True)
    except InvalidSpecifier:
        return True


def _labels(pin: Pin, entry: Recorded, texts: Texts, pins: Collection[str]) -> Iterator[Finding]:
    """The build that the index gives (`2.13.0+cu130`) and the libraries that it requires (`…-cu13`) fit.

    A library for another CUDA (`…-cu12`) passes where that for this one is pinned beside it: some require both.
    """
    for label in local_label(entry.version).split("."):
        for found in texts.label(label, f"{pin.name} {entry.version}"):
            if found.wrong:
                yield Finding(pin.path, pin.line, 0, found.wrong, "metadata")
    for text in entry.requires_dist:
        required, stem, suffix = _named(text)
        for found in texts.label(suffix, f"{pin.name} {entry.version} requires {required}"):
            if found.wrong and not _beside(stem, pins, texts):
                yield Finding(pin.path, pin.line, 0, found.wrong, "metadata")


@lru_cache(maxsize=4096)
def _named(text: str) -> tuple[str, str, str]:
    """What a requirement says without its marker, and its name: before the last dash and after it."""
    stem, _, suffix = canonical(re.split(r"[^\w.-]", text, maxsplit=1)[0]).rpartition("-")
    return re.split(r"[\s;]", text, maxsplit=1)[0], stem, suffix


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


def applicable(
    entry: Recorded, extras: tuple[str, ...], python: str, concerns: Callable[[str], bool] = lambda _: True
) -> Iterator[Requirement]:
    """The requirements that hold on Linux with that Python and those extras, of distributions that are of concern."""
    for text in entry.requires_dist:
        named = _DISTRIBUTION.match(text)
        if named is not None and concerns(canonical(named[0].lstrip())):
            requirement = _holding(text, extras, python)
            if requirement is not None:
                yield requirement


@lru_cache(maxsize=4096)  # several files pin the same packages
def _holding(text: str, extras: tuple[str, ...], python: str) -> Requirement | None:
    """A requirement, None where it is none or does not hold."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    marker, around = requirement.marker, environment(python)
    holds = marker is None or any(marker.evaluate({**around, "extra": extra}) for extra in ("", *extras))
    return requirement if holds else None


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
