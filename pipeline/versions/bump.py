"""Moving versions: what is asked for, what is tied to it, what that renders, whether it agrees; then all is written.

versions.json ──replace values──▶ rendered files ──check, nothing written yet──▶ findings, or one unified diff
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contract.errors import DriftError, UsageError
from pipeline.contract.files import write_whole

from . import index
from .agreement import check_meaning
from .findings import Finding, counted, near
from .meaning import collect
from .metadata import applicable, governed_pins, python_version
from .recorded import RECORD, Record, Recorded, dump_record, load_record
from .relations import canonical
from .render import FOLDER, has_templates, render
from .rendered import unified
from .requirements import Pin
from .sites import same_version
from .source import FILE, SourceInvalid, Versions, load, read
from .tree import Overlay, Tree, ordinary

_ROUNDS = 20


class BumpRefused(UsageError):
    """What was asked for cannot be done; nothing was written."""


class BumpDisagrees(DriftError):
    """The new versions do not agree with each other or with the tree; nothing was written."""

    def __init__(self, findings: Sequence[Finding], *, templates: bool = True) -> None:
        by_hand = (
            f"there is no {FOLDER}/ to render these places from: write the new versions there by hand, then repeat"
        )
        super().__init__(
            "the new versions do not agree; nothing was written",
            hint="name further versions in the same command, or correct what is listed" if templates else by_hand,
            details=[finding.text() for finding in findings],
        )
        self.findings = tuple(findings)


@dataclass(frozen=True)
class Move:
    """One name from one value to another, and why, where nobody asked for it."""

    name: str
    old: str
    new: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}" + (f" ({self.why})" if self.why else "")


@dataclass
class Bump:
    """The outcome: moves, the new bytes of every file that changes, and the same as a unified diff."""

    moves: list[Move] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    diff: str = ""
    source: bytes = b""  # versions.json as it was read


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    values: Mapping[str, str]
    latest: tuple[str, ...] = ()
    offline: bool = False
    allow_downgrade: bool = False
    refresh: bool = False


def bump(root: Path, wishes: Wishes, say: Callable[[str], None]) -> Bump:
    """Work out a bump without writing anything; raise `BumpRefused`, `BumpDisagrees` or an index error."""
    return _Bump(root, wishes, say).run()


def write(root: Path, outcome: Bump) -> None:
    """Write every changed file, each whole; versions.json first, since `pipeline sync` can follow it from there."""
    if outcome.files and (root / FILE).read_bytes() != outcome.source:
        raise BumpRefused(f"{FILE} was changed in the meantime; nothing was written", hint="repeat the command")
    for path in sorted(outcome.files, key=lambda path: path != FILE):
        full = root / path
        mode = full.stat().st_mode & 0o777 if full.exists() else 0o644
        try:
            write_whole(full, outcome.files[path], mode=mode)
        except OSError as error:
            first = path == FILE
            hint = (
                "make it writable, then repeat the command; nothing was written"
                if first
                else f"{FILE} is written: make this writable, then run `pipeline sync`"
            )
            raise BumpRefused(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def replaced(versions: Versions, values: Mapping[str, str]) -> Versions:
    """versions.json with new values: its order and layout stay."""
    text = versions.text
    for name in sorted(values, key=lambda name: -versions.variables[name].start):
        variable = versions.variables[name]
        text = text[: variable.start] + json.dumps(values[name]) + text[variable.end :]
    return read(text.encode())


class _Bump:
    def __init__(self, root: Path, wishes: Wishes, say: Callable[[str], None]) -> None:
        self.root = root
        self.wishes = wishes
        self.say = say
        self.old = load(root)
        self.tree = Tree(root)
        self.meaning = collect(self.tree, self.old)
        self.pins = governed_pins(self.old, self.meaning)
        self.python = python_version(self.old)
        self.moves: dict[str, Move] = {}

    def run(self) -> Bump:
        for name in (*self.wishes.values, *self.wishes.latest):
            if name not in self.old:
                hint = near(name, self.old).removeprefix("; ") or f"names stand in {FILE}"
                raise BumpRefused(f"{FILE} has no {name}", hint=hint)
        for name, value in self.wishes.values.items():
            self._move(name, value)
        for name in self.wishes.latest:
            self._move(name, self._newest(name))
        self._tied()
        record = self._record()
        return self._outcome(record)

    def _move(self, name: str, value: str, why: str = "") -> None:
        old = self.old.variables[name].raw
        if value != old:
            self.moves[name] = Move(name, old, value, why)

    def _tied(self) -> None:
        """Names that are the same version as one that moves."""
        for name in self.old:
            other = self.old.relation(name).same_as
            if other in self.moves and name not in self.wishes.values:
                self._move(name, self.moves[other].new, f"moves with {other}")

    def _packages(self, name: str) -> list[Pin]:
        """The pins that a name governs in this tree."""
        return [self.pins[package] for package in self.old.relation(name).governs() if package in self.pins]

    def _newest(self, name: str) -> str:
        packages = [pin.name or "" for pin in self._packages(name)] or list(self.old.relation(name).governs())[:1]
        if not packages:
            raise BumpRefused(f"{name} governs no package, so no index knows its newest version", hint=f"{name}=…")
        found = [self._available(package) for package in packages]
        common = [version for version in found[0] if all(_has(versions, version) for versions in found[1:])]
        if not common:
            raise BumpRefused(f"no version of {', '.join(packages)} is common to all of them")
        return common[0].partition("+")[0]

    def _available(self, package: str, *, pre: bool = False) -> list[str]:
        if self.wishes.offline:
            raise BumpRefused(
                f"`--offline` cannot look up {package}", hint="name the version, or leave `--offline` out"
            )
        self.say(f"asking the index for {package}")
        return index.available(package, self.python, pre=pre)

    def _checked(self) -> Versions:
        """The source with all moves; refuses downgrades and versions that the index does not have."""
        try:
            new = replaced(self.old, {name: move.new for name, move in self.moves.items()})
        except SourceInvalid as error:  # the file was right before: what was asked for is not
            said = "; ".join(finding.message for finding in error.findings)
            raise BumpRefused(said, hint="name another version; nothing was written") from None
        for name in self.moves:
            self._refuse_downgrade(name, self.old[name], new[name])
        return new

    def _refuse_downgrade(self, name: str, old: str, new: str) -> None:
        from packaging.version import InvalidVersion, Version

        try:
            lower = Version(new) < Version(old)
        except InvalidVersion:
            return
        if lower and not self.wishes.allow_downgrade:
            raise BumpRefused(f"{name} would go down from {old} to {new}", hint="`--allow-downgrade` if that is meant")

    def _record(self) -> Record | None:
        """What the pins would require; moves what a moved package requires, until all agrees or no move helps."""
        known, wrong = load_record(self.tree)
        if self.wishes.offline:
            for package in sorted(
                p for name in self.moves for p in self.old.relation(name).governs() if p in self.pins
            ):
                self.say(f"note: what {package} requires was not looked up; `pipeline bump --refresh` does it later")
            return None
        if wrong and not self.wishes.refresh:
            raise BumpDisagrees(wrong)
        record = dict(known or {}) if not self.wishes.refresh else {}
        self._unpinned()
        for _ in range(_ROUNDS):
            new = self._checked()
            wanted = [
                (package, pin.extras, new[new.governors()[package]])
                for package, pin in sorted(self.pins.items())
                if not (package in record and same_version(record[package].version, new[new.governors()[package]]))
            ]
            if wanted:
                self._exists(wanted)
                self.say(f"reading the metadata of {counted(len(wanted), 'package')}")
                record |= index.describe(wanted, python_version(new))
            if not self._follow(new, record):
                break
        return {name: entry for name, entry in record.items() if name in self.pins}

    def _unpinned(self) -> None:
        """Look up what moves and is pinned nowhere (an ARG alone), where versions.json says which package it is."""
        new = self._checked()
        for name in self.moves:
            packages = self.old.relation(name).packages
            if packages and not self._packages(name):
                self._exists([(packages[0], (), new[name])])

    def _exists(self, wanted: Sequence[tuple[str, tuple[str, ...], str]]) -> None:
        """Refuse a version that the index lacks, with the nearest that it has."""
        for package, _, version in wanted:
            if self.old.governors()[package] not in self.moves:
                continue
            versions = self._available(package, pre=_is_pre(version))
            if not _has(versions, version):
                close = index.nearest(versions, version)
                name = self.old.governors()[package]
                raise BumpRefused(f"the index has no {package} {version}", hint=f"nearest is {name}={close}")

    def _follow(self, new: Versions, record: Mapping[str, Recorded]) -> bool:
        """Move one pin that a package's new requirements forbid; whether there was one to move."""
        governors = new.governors()
        asked: dict[str, list[tuple[str, object]]] = {}
        for package, pin in self.pins.items():
            if package not in record:
                continue
            for requirement in applicable(record[package], pin.extras, python_version(new)):
                said = f"{package} {record[package].version} requires {requirement.name}{requirement.specifier}"
                asked.setdefault(canonical(requirement.name), []).append((said, requirement.specifier))
        for package, rows in asked.items():
            name = governors.get(package, "")
            if package not in self.pins or name in self.wishes.values or name in self.moves:
                continue
            broken = [said for said, specifier in rows if not _allows(specifier, new[name])]
            if not broken:
                continue
            fits = [v for v in self._available(package) if all(_allows(specifier, v) for _, specifier in rows)]
            if fits:
                self._move(name, fits[0].partition("+")[0], broken[0])
                return True
        return False

    def _outcome(self, record: Record | None) -> Bump:
        new = self._checked()
        files: dict[str, bytes] = {FILE: new.text.encode()}
        if record or (record is not None and self._before(RECORD) is not None):
            files[RECORD] = dump_record(record)
        if has_templates(self.root):
            files |= render(self.root, new).files
        changed = {path: data for path, data in files.items() if data != self._before(path)}
        result = check_meaning(Overlay(self.root, files), new, record=record)
        late = ("record",) if self.wishes.offline else ()  # what is recorded later cannot be known now
        findings = [finding for finding in result.findings if finding.rule not in late]
        if findings:
            raise BumpDisagrees(findings, templates=has_templates(self.root))
        shown = sorted(changed, key=lambda path: (path != FILE, path))
        diff = "".join(unified(path, self._before(path) or b"", changed[path], "before", "after") for path in shown)
        return Bump(list(self.moves.values()), changed, diff, self.old.text.encode())

    def _before(self, path: str) -> bytes | None:
        try:
            return Path(ordinary(self.root / path)).read_bytes()
        except OSError:
            return None


def _has(versions: Sequence[str], wanted: str) -> bool:
    return any(same_version(version, wanted) for version in versions)


def _is_pre(version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).is_prerelease
    except InvalidVersion:
        return False


def _allows(specifier: object, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    assert isinstance(specifier, SpecifierSet)
    try:
        return specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True
