"""What the files of a tree say about versions, whether or not anything was rendered: every place, right or wrong.

Read are docker/ and requirements/, and beside versions.json itself Dockerfiles, bake files and requirements files.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch

from .bake import NestedTooDeeply, Text, read_hcl, read_json
from .dockerplaces import Dockerplaces
from .findings import Finding
from .looked import kind_of, looked_at
from .requirements import Pin, Requirements, read
from .shelltext import script
from .sites import Site
from .source import FILE, SUFFIX, Versions
from .templates import FOLDER, has_templates
from .texts import Found, Texts
from .tree import Tree, Unreadable, decode

_FIRST = re.compile(r"\A\ufeff?(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*(?:FROM|ARG)[ \t]+\S", re.IGNORECASE)
_FROM = re.compile(r"^[ \t]*FROM[ \t]+\S", re.IGNORECASE | re.MULTILINE)
_PINNED = re.compile(r"={2,3}([^,*]+)")
_LARGEST = 4 * 1024 * 1024  # bytes; a file that large is data


@dataclass
class Meaning:
    """Every site, what cannot be read, the pins by file, which names reach something; and what looked into texts."""

    texts: Texts
    sites: set[Site] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    requirements: dict[str, Requirements] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


def collect(tree: Tree, versions: Versions) -> Meaning:
    """Look at every file that may hold a version."""
    return _Collector(tree, versions).run()


def judge(versions: Versions, meaning: Meaning) -> list[Finding]:
    """The findings of a look: what disagrees, what cannot be read, and names that reach nothing."""
    findings = list(meaning.findings)
    findings += [Finding(site.path, site.line, 0, site.wrong, site.kind) for site in meaning.sites if site.wrong]
    closed = versions.closure(meaning.reached)
    findings += [
        Finding(FILE, versions.variables[name].line, 0, f"{name} reaches no ARG, pin or bake argument", "reach")
        for name in versions
        if name not in closed
    ]
    return findings


class _Collector:
    def __init__(self, tree: Tree, versions: Versions) -> None:
        self.tree = tree
        self.versions = versions
        self.texts = Texts(versions)
        self.result = Meaning(self.texts)
        self.rendered = has_templates(tree.root)

    def run(self) -> Meaning:
        for path in looked_at(self.tree, self.result.findings):
            kind = kind_of(path)
            if kind is None:
                continue
            if kind == "requirements":
                self._requirements(path)
                continue
            try:
                data = self.tree.read(path)
            except Unreadable as error:
                self.result.findings.append(error.finding)
                continue
            if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                if kind != "text":  # nothing hides behind one byte
                    self.result.findings.append(Finding(path, 0, 0, "is no text", "read"))
                    continue
                if b"\0" in data[:8192]:
                    continue
            if kind == "docker" and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                message = "is UTF-16, which BuildKit does not read"
                self.result.findings.append(Finding(path, 0, 0, message, "dockerfile"))
                continue
            if len(data) > _LARGEST:
                larger = self.result.notes if kind == "text" else self.result.findings  # nothing hides behind its size
                larger.append(Finding(path, 0, 0, "is too large to be looked at", "read"))
                continue
            self._text(path, kind, decode(data)[0] if kind != "docker" else data.decode("utf-8", "replace"))
        return self.result

    def _text(self, path: str, kind: str, text: str) -> None:
        if kind == "docker" or (kind == "text" and _FIRST.match(text) and _FROM.search(text)):
            self._dockerfile(path, text, 0)
        elif kind == "hcl":
            try:
                self._bake(path, read_hcl(text))
            except NestedTooDeeply as error:
                self.result.findings.append(Finding(path, error.line, 0, "is nested too deeply", "bake"))
        elif kind == "json":
            texts, problems = read_json(text)
            self.result.findings += [Finding(path, line, 0, message, "bake") for line, message in problems]
            self._bake(path, texts)
        else:
            whole, line = script(text, self.versions)
            self.found(path, self.texts.look(whole), line)

    def found(self, path: str, found: Iterable[Found], line: Callable[[int], int]) -> None:
        """Add what was found inside a text; `line` turns an offset into a line."""
        self.result.sites |= {Site(path, line(one.at), one.name, one.kind, one.text, one.wrong) for one in found}

    def _dockerfile(self, path: str, text: str, above: int) -> None:
        places = Dockerplaces(self.texts, text)
        self.result.findings += [
            Finding(path, problem.line + above, 0, f"BuildKit refuses this: {problem.message}", "dockerfile")
            for problem in places.problems
        ]
        args = list(places.args())
        given = {name for _, name, value, _ in args if value is not None}
        for line, name, value, made in args:
            if value is None and name not in given:
                self._managed(path, line + above, f"ARG {name}", name)
            self._arg(path, line + above, "ARG", name, value, made=made)
        for line, one in places.inside():
            self.result.sites.add(Site(path, line + above, one.name, one.kind, one.text, one.wrong))

    def _arg(self, path: str, line: int, what: str, name: str, value: str | None, *, made: bool = False) -> None:
        """An ARG, a bake variable or a bake argument with its value, None where it has none of its own.

        One that is `made` of others holds no version that is not written elsewhere.
        """
        versions = self.versions
        if name in versions:
            if what != "variable":
                self.result.reached.add(name)
            wrong = ""
            if value is not None and value != versions[name]:
                wrong = f"{what} {name}={value}, {FILE} says {versions[name]}"
            kind = "ARG" if what == "ARG" else "bake"
            text = f"{what} {name}" + ("" if value is None else f"={value}")
            self.result.sites.add(Site(path, line, name, kind, text, wrong))
            return
        if not value:
            if value == "" and not made:
                self._managed(path, line, f"{what} {name}=", name)
            return
        stem = re.fullmatch(r"(.+?)(?:_GIT)?_(?:REF|TAG|BRANCH)", name, re.IGNORECASE)
        governed = f"{stem[1]}{SUFFIX}".upper() if stem else ""
        if governed in versions:
            self.found(path, self.texts.ref(name, governed, value), lambda _: line)
        elif not made:
            self._managed(path, line, f"{what} {name}={value}", name)
        self.found(path, self.texts.look(value), lambda _: line)

    def _managed(self, path: str, line: int, text: str, name: str) -> None:
        """A finding where a name that looks like a version is neither managed nor left out on purpose."""
        versions = self.versions
        if name in versions or not name.upper().endswith(SUFFIX):
            return
        if any(fnmatch(name, one) for one in versions.unmanaged):
            return
        alike = next((other for other in versions if other.upper() == name.upper()), "")
        hint = f'; did you mean "{alike}"?' if alike else ""
        message = f"{text} is not managed: {FILE} has no {name}{hint}"
        self.result.findings.append(Finding(path, line, 0, message, "unmanaged"))

    def _bake(self, path: str, texts: Iterable[Text]) -> None:
        for text in texts:
            match text.path:
                case ("variable", name, "default"):
                    self._arg(path, text.line, "variable", name, text.value if "${" not in text.value else None)
                case ("target", _, "args", name):
                    self._arg(path, text.line, "argument", name, text.value if "${" not in text.value else None)
                case ("target", _, "dockerfile-inline"):
                    self._dockerfile(path, text.value, text.line - 1)
                case _:
                    self.found(path, self.texts.look(text.value), lambda _, line=text.line: line)  # type: ignore[misc]

    def _requirements(self, path: str) -> None:
        read_one = read(self.tree, path)
        self.result.requirements[path] = read_one
        self.result.findings += read_one.problems
        self.result.notes += read_one.notes
        for pin in read_one.pins:
            self._pin(pin)
        for option in read_one.options:
            self.found(option.path, self.texts.look(" ".join(option.words)), lambda _, line=option.line: line)  # type: ignore[misc]

    def _pin(self, pin: Pin) -> None:
        name = self.texts.governors.get(pin.name or "")
        if pin.url:
            self.found(pin.path, self.texts.address(pin.url), lambda _: pin.line)
        if name is None:
            if self.rendered and pin.specifier:
                message = f"{pin.name}{pin.specifier} is written outside {FILE}; {FOLDER}/ takes every version from it"
                self.result.findings.append(Finding(pin.path, pin.line, 0, message, "unmanaged"))
            return
        self.result.reached.add(name)
        text = f"{pin.name}{pin.specifier}"
        version = pinned(pin.specifier)
        if version is not None:
            self.found(pin.path, self.texts.pin(pin.name or "", text, version), lambda _: pin.line)
        elif not pin.url:
            wrong = f"{text} is not pinned, {FILE} says {self.versions[name]} ({name})"
            self.result.sites.add(Site(pin.path, pin.line, name, "pin", text, wrong))
        for extra in pin.extras:
            self.found(pin.path, self.texts.label(extra, f"{pin.name}[{extra}]{pin.specifier}"), lambda _: pin.line)


def pinned(specifier: str) -> str | None:
    """The version of a specifier that allows one version only."""
    found = _PINNED.fullmatch(specifier)
    return found[1] if found else None
