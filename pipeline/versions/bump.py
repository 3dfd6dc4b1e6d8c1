"""Moving versions: what is asked for, what is tied to it, what that renders, whether it agrees; then all is written.

versions.json ──replace values──▶ rendered files ──check, nothing written yet──▶ findings, or one unified diff
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import index
from .additions import Addition, additions, edited
from .agreement import check_meaning
from .findings import counted, near
from .meaning import collect
from .metadata import applicable, governed_pins, python_version
from .outcome import Bump, BumpDisagrees, BumpRefused, Move, write
from .recorded import RECORD, Record, Recorded, dump_record, load_record
from .relations import canonical
from .render import render
from .rendered import unified
from .requirements import Pin
from .sites import same_version
from .source import FILE, SourceInvalid, Versions, load
from .templates import has_templates
from .tree import Overlay, Tree, Unreadable, ordinary

__all__ = ["Bump", "BumpDisagrees", "BumpRefused", "Wishes", "bump", "write"]

_ROUNDS = 20


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
        self.new: dict[str, str] = {}  # a name that versions.json lacks -> the one that it will stand behind
        self.templates: dict[str, bytes] = {}  # those that pin more than before

    def run(self) -> Bump:
        for name in (*self.wishes.values, *self.wishes.latest):
            if name not in self.old:
                raise BumpRefused(f"{FILE} has no {name}", hint=self._meant(name))
        for name, value in self.wishes.values.items():
            self._move(name, value)
        for name in self.wishes.latest:
            self._move(name, self._newest(name))
        self._tied()
        record = self._record()
        return self._outcome(record)

    def _meant(self, name: str) -> str:
        """The hint for a name that is not there: a package's, or one like it."""
        plain = f"{name.upper().replace('-', '_')}_VERSION"
        meant = plain if plain in self.old else self.old.governors().get(name)
        said = f'did you mean "{meant}"?' if meant else near(name, self.old).removeprefix("; ")
        return said or f"names stand in {FILE}"

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
            values = {name: move.new for name, move in self.moves.items() if name not in self.new}
            new = edited(self.old, values, {name: (self.moves[name].new, at) for name, at in self.new.items()})
        except SourceInvalid as error:  # the file was right before: what was asked for is not
            said = "; ".join(finding.message for finding in error.findings)
            raise BumpRefused(said, hint="name another version; nothing was written") from None
        for name in self.moves:
            if name in self.old:
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
                self.say(
                    f"note: what {package} requires was not looked up; `pipeline versions bump --refresh` does it later"
                )
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
            if not self._follow(new, record) and not self._add(new, record):
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
            if self.old.governors().get(package) not in self.moves:
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

    def _add(self, new: Versions, record: Mapping[str, Recorded]) -> bool:
        """Pin what the new requirements ask for and nothing pins; whether there was something that could be."""
        wanted = additions(new, self.meaning, record, python_version(new))
        return sum(self._added(new, one) for one in wanted) > 0

    def _added(self, new: Versions, one: Addition) -> bool:
        """A line in the template of one file, and a name in versions.json where no other file has that pin."""
        name = new.governors().get(one.package, one.name)
        behind = [new.governors()[p.name] for p in self.meaning.requirements[one.path].pins if p.name in self.pins]
        behind = [other for other in behind if other in self.old]
        if not behind or (name in new and one.package not in new.governors()) or not one.name.isidentifier():
            return False
        try:
            written = self.templates.get(one.template) or self.tree.read(one.template)
        except Unreadable:
            return False
        if name not in new:
            try:
                known = self._available(one.package)
            except index.IndexLacks:
                return False
            fits = [version for version in known if all(_allows(allowed, version) for allowed in one.allowed)]
            if not fits:
                return False
            self.new[name] = behind[-1]
            self.moves[name] = Move(name, "", fits[0].partition("+")[0], one.why)
        version = self.moves[name].new if name in self.moves else new[name]
        end = b"" if written.endswith(b"\n") or not written else b"\n"
        self.templates[one.template] = written + end + one.line(name).encode()
        pin = one.pin(version)
        self.meaning.requirements[one.path].pins.append(pin)
        self.pins.setdefault(one.package, pin)
        return True

    def _outcome(self, record: Record | None) -> Bump:
        new = self._checked()
        files: dict[str, bytes] = {FILE: new.text.encode(), **self.templates}
        if record or (record is not None and self._before(RECORD) is not None):
            files[RECORD] = dump_record(record)
        if has_templates(self.root):
            files |= render(self.root, new, self.templates).files
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
