"""Where versions stand in a tree: ARGs, pins, bake files, image tags, git refs, addresses, assignments, labels.

Commands are read by patterns, not as a shell: comments go, continuations are joined, `$NAME` becomes what an ARG or
ENV says, and directories are not followed.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from pipeline.contract.text import without_login

from .dockerfile import Arg
from .dockerfile import read as read_dockerfile
from .findings import Finding
from .lock import target
from .requirements import LARGEST, Pin, decode, read, read_bytes, read_text
from .source import Versions, canonical

_FOLDERS = ("docker", "requirements")
_BESIDE = ("Dockerfile*", "*.Dockerfile", "docker-bake*", "requirements*.txt", "requirements*.in", "constraints*.txt")
_PASSED_OVER = ("*.md", "*.j2", "*.lock", "*.dockerignore", "versions.json")
_VERSION = r"\d+(?:\.\d+)*(?:[._-]?(?:post|rc|alpha|beta|dev|a|b)\.?\d*)*"
_PIN = re.compile(
    rf"(?<![\w./@:-])([A-Za-z][A-Za-z0-9._-]*)(?:\[[^\]\n]{{0,200}}\])?\s*(?:={{2,3}}(?:\s*|\\?[\"'])|@(?!\w*[:/]))"
    rf"({_VERSION}(?:\+[A-Za-z0-9.]+)?)(?![\w@/:]|\.\d)"
)
_ADDRESS = re.compile(r"(?:\b[a-z][a-z+]*://|\bgit@[\w.-]+:|\$\{?\w+[^\s/]*/)[^\s\"'<>|;`)\\]+")
_ARCHIVED = re.compile(
    rf"([A-Za-z0-9][A-Za-z0-9._]*?)-({_VERSION}(?:(?:\+|%2[Bb])[A-Za-z0-9.]+)?)(?:-[^/\s\"']*\.whl|\.tar\.gz|\.zip)"
)
_IN_ADDRESS = re.compile(
    r"/(?:archive|tree|blob|tarball|zipball|releases/download|releases/tag)/(?:refs/tags/)?([^/\s]+?)(?:\.tar\.\w+|\.zip)?(?:/|$)"
)
_AFTER = re.compile(r"(?:[@#]|\?(?:tag|ref)=)(?:refs/tags/)?([^@#&\s]+)")
_CLONE = re.compile(r"\bgit\s+[^;&|\n]*?\b(?:clone|fetch|remote\s+add)\b([^;&|\n]*)")
_BRANCH = re.compile(r"(?:--branch|--revision|-b)[\s=]*[\"']?(?:refs/tags/)?([^\s\"';&|]+)")
_BAKE_DEFAULT = r'(?:"([^"\n]*)"|([^",\s{}]+))'
_BAKE_VARIABLES = (
    re.compile(rf'variable\s+"(\w+)"\s*\{{(?:[^{{}}"]|"[^"\n]*")*?\bdefault\s*=\s*{_BAKE_DEFAULT}'),  # HCL
    re.compile(rf'"(\w+)"\s*:\s*\{{\s*"default"\s*:\s*{_BAKE_DEFAULT}'),  # JSON
)
_HCL_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|(?:#|//)[^\n]*|/\*.*?\*/', re.DOTALL)
_LIKE_VERSION = re.compile(r".*_VERSION", re.IGNORECASE)
_NUMBER = re.compile(r"v?\d")


class Occurrence(NamedTuple):
    """One place that a name governs; `wrong` says what is wrong with it, empty where nothing is."""

    path: str
    line: int
    name: str
    kind: str  # ARG, pin, bake, image, git, label, value, template
    text: str
    wrong: str = ""


@dataclass
class Scan:
    """All occurrences of a tree, and what could not be read or is written without a name."""

    occurrences: list[Occurrence] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def wrong(self) -> list[Finding]:
        """Every occurrence that disagrees, as a finding."""
        said = {(o.path, o.line, f"{o.text}{o.wrong}"): o.kind for o in self.occurrences if o.wrong}
        return [Finding(path, line, message, kind) for (path, line, message), kind in said.items()] + self.findings


def files(root: Path) -> Iterator[str]:
    """The paths of a tree that are read, sorted: docker/, requirements/, and what lies beside them."""
    found = {path for pattern in _BESIDE for path in root.glob(pattern)}
    for folder in _FOLDERS:
        found |= {path for path in (root / folder).rglob("*") if not path.is_dir()}
    for path in sorted(found):
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in _PASSED_OVER) and path.name != ".gitignore":
            yield path.relative_to(root).as_posix()


def scan(root: Path, versions: Versions, *, rendered: Mapping[str, bytes] | None = None) -> Scan:
    """Look through a tree; `rendered` files replace those that lie there."""
    result = Scan()
    scanner = _Scanner(versions, result)
    locked = set(map(target, versions.locks))
    for path in sorted({*files(root), *(rendered or {})}):
        data = rendered[path] if rendered and path in rendered else _bytes(root, path, result)
        if data is None:
            continue
        try:
            text = decode(data)
        except UnicodeError:
            if _is_read(path):
                result.findings.append(Finding(path, 0, "is text neither in UTF-8 nor in UTF-16", "read"))
            continue
        if path in locked:
            scanner.pins(read_text(text, path).pins)
        elif _is_requirements(path):
            found = read_text(text, path) if rendered and path in rendered else read(root, path)
            scanner.pins([pin for pin in found.pins if pin.path == path])
            result.findings += found.problems  # also of what it includes: a circle is closed there
            scanner.text(path, re.sub(r"(?m)^[^-].*", "", text))  # options: addresses of indexes
        elif _is_dockerfile(path):
            scanner.dockerfile(path, text)
        else:
            if _is_bake(path):
                text = _HCL_COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
                scanner.bake(path, text)
            scanner.text(path, text)
    result.occurrences = list(dict.fromkeys(sorted(result.occurrences)))
    return result


def _bytes(root: Path, path: str, result: Scan) -> bytes | None:
    place = root / path
    try:
        if not place.resolve().is_relative_to(root.resolve()):
            raise OSError(0, "a link out of the tree")
        if not _is_read(path) and place.is_file() and place.stat().st_size > LARGEST:
            return None
        data = read_bytes(place)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link in a circle
        why = error.strerror if isinstance(error, OSError) else "a link in a circle"
        result.findings.append(Finding(path, 0, f"cannot be read: {why}", "read"))
        return None
    return None if b"\0" in data[:8192] and not _is_read(path) else data


def _is_read(path: str) -> bool:
    return "ockerfile" in path.rpartition("/")[2] or _is_bake(path) or _is_requirements(path)


def _is_requirements(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".txt", ".in")) and (
        path.startswith("requirements/") or name.startswith(("requirements", "constraints"))
    )


def _is_bake(path: str) -> bool:
    return "bake" in path.rpartition("/")[2] and path.endswith((".hcl", ".json"))


def _is_dockerfile(path: str) -> bool:
    name = path.rpartition("/")[2]
    return "ockerfile" in name and not name.endswith((".dockerignore", ".hcl", ".json", ".sh", ".py"))


class _Text(NamedTuple):
    """Commands or settings of one file, and the offset at which each of its lines begins, with its number."""

    path: str
    text: str
    starts: list[tuple[int, int]]

    def line(self, at: int) -> int:
        """The line of an offset."""
        return self.starts[bisect_right(self.starts, (at, 1 << 60)) - 1][1]


class _Scanner:
    def __init__(self, versions: Versions, result: Scan) -> None:
        self.versions = versions
        self.result = result
        self.packages = versions.packages()
        governs = versions.governs
        self.images = {image: name for name, what in governs.items() for image in what.images}
        self.repositories = {
            one: name for name, what in governs.items() for one in (*what.packages, *what.repositories)
        }
        self.labels = [(name, label) for name, what in governs.items() for label in what.labels]
        names = "|".join(map(re.escape, versions))
        value = r"([^\s\"'$`;&|,)}\]<>\\]{1,200})"
        # NAME=1, NAME: "1", NAME ?= 1, NAME: str = "1", -DNAME=1, NAME=${X:-1}, ${NAME:-1}, get("NAME", "1")
        self.assigned = re.compile(
            rf"(?:(?:(?<![\w$./-])(?<!\$\{{)|(?<=-D))({names})\\?[\"']?"
            rf"\s*(?:[:?+]?=|:\s*str\s*=|:|,|\)\s*or)[ \t]*\\?[\"']?"
            rf"(?:\$\{{\w+:?[-=])?|\$\{{({names}):?[-=]){value}"
        )
        self.unmanaged: set[tuple[str, str]] = set()  # path and name: said once

    def add(self, path: str, line: int, name: str, kind: str, text: str, *, ok: bool, expected: str = "") -> None:
        said = "" if kind in ("ARG", "bake", "value") else f" ({name})"
        wrong = "" if ok else f", {self.versions.file} says {expected or self.versions[name]}{said}"
        self.result.occurrences.append(Occurrence(path, line, name, kind, without_login(text), wrong))

    # -- ARGs and bake files

    def dockerfile(self, path: str, text: str) -> None:
        found = read_dockerfile(text)
        for problem in found.problems:
            message = f"BuildKit refuses this: {problem.message}"
            self.result.findings.append(Finding(path, problem.line, message, "ARG"))
        for arg in found.args:
            self._arg(path, arg)
        for stage in found.stages:
            self._images(_Text(path, stage.base, [(0, stage.line)]))
        lines = text.removeprefix("\ufeff").split("\n")
        for instruction, known in zip(found.instructions, found.known, strict=True):
            first, last = instruction.start_line, instruction.end_line
            if instruction.name == "ENV":
                for name, value in zip(instruction.args[::3], instruction.args[1::3], strict=True):
                    if name in self.versions:
                        self._value(path, first, name, _filled(value.strip("\"'"), known), "value")
            elif instruction.name not in ("FROM", "ARG", "LABEL", "CMD", "ENTRYPOINT"):
                self.text(path, "\n".join(lines[first - 1 : last]), known, first)

    def _arg(self, path: str, arg: Arg) -> None:
        shown = f"ARG {arg.name}" + ("" if arg.raw is None else f"={arg.raw if arg.value is None else arg.value}")
        if arg.name in self.versions:
            ok = arg.raw is None or arg.value == self.versions[arg.name]
            self.add(path, arg.line, arg.name, "ARG", shown, ok=ok)
        elif self._unmanaged(arg.name):
            made_of = re.findall(r"\$\{?(\w+)", arg.raw or "")
            if self.versions.keys().isdisjoint(made_of) and (path, arg.name) not in self.unmanaged:
                self.unmanaged.add((path, arg.name))
                meant = next((f"; did you mean {one}?" for one in self.versions if one.lower() == arg.name.lower()), "")
                message = f"{shown} is not managed: {self.versions.file} has no {arg.name}{meant}"
                self.result.findings.append(Finding(path, arg.line, message, "ARG"))
        elif arg.value and re.search(r"_(?:REF|TAG|BRANCH)$", arg.name):
            name = next((n for r, n in self.repositories.items() if arg.name.lower().startswith(canonical(r))), None)
            if name is not None:
                self._ref(path, arg.line, arg.name, name, arg.value)

    def _unmanaged(self, name: str) -> bool:
        """Whether a name is that of a version, and neither managed nor left to whoever wrote it."""
        known = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.versions.unmanaged)
        return self.versions.own and not known and bool(_LIKE_VERSION.fullmatch(name))

    def bake(self, path: str, text: str) -> None:
        """Variables and their defaults, of HCL and of JSON, quoted or not; arguments are read as assignments."""
        for found in (one for pattern in _BAKE_VARIABLES for one in pattern.finditer(text)):
            name, value = found[1], found[2] or found[3] or ""
            line = text.count("\n", 0, found.end()) + 1
            if name in self.versions:
                value = re.sub(r"\$\{(\w+)\}", lambda m: self.versions.get(m[1], m[0]), value)
                self._value(path, line, name, value, "bake")
            elif self._unmanaged(name):
                message = f"variable {name}={value} is not managed: {self.versions.file} has no {name}"
                self.result.findings.append(Finding(path, line, message, "bake"))

    def _value(self, path: str, line: int, name: str, value: str, kind: str) -> None:
        """Compare a value, unless a variable in it is unknown here, or it is another project's setting (MAX_JOBS)."""
        setting = not self.versions.own and (not value or (kind == "value" and not _LIKE_VERSION.fullmatch(name)))
        if value != name and "$" not in value and not setting:  # bake: an argument is the variable of its own name
            self.add(path, line, name, kind, f"{name}={value}", ok=value == self.versions[name])

    # -- pins

    def pins(self, pins: list[Pin]) -> None:
        """Requirements of a file: a governed one must be a pin, of that version."""
        for pin in pins:
            name = self.packages.get(pin.name or "")
            shown = f"{pin.name or ''}{pin.specifier}"
            if name is not None and pin.url and not pin.version:
                found = _AFTER.search(without_login(pin.url).partition("#egg")[0].partition("://")[2])
                if found:
                    self._ref(pin.path, pin.line, pin.name or "", name, found[1])
                else:
                    self.add(pin.path, pin.line, name, "pin", f"{pin.name} @ {pin.url}: no version", ok=False)
            elif name is not None:
                ok = pin.version is not None and _same(pin.version, self.versions[name])
                said = shown if pin.version is not None else f"{shown} is not pinned"
                self.add(pin.path, pin.line, name, "pin", said, ok=ok)
            self._labels(_Text(pin.path, f"{pin.url} {shown}", [(0, pin.line)]))

    # -- text

    def text(self, path: str, raw: str, known: Mapping[str, str] | None = None, first: int = 1) -> None:
        """Everything that patterns find in commands and settings."""
        text = _joined(path, raw, known or {}, first)
        for pattern, sign in ((_PIN, "=="), (_ARCHIVED, "-")):
            for found in pattern.finditer(text.text):
                name = self.packages.get(canonical(found[1]))
                if name is not None:
                    version = found[2].replace("%2B", "+").replace("%2b", "+")
                    shown = f"{found[1]}{'@' if '@' in found[0] else sign}{version}"
                    ok = _same(version, self.versions[name])
                    self.add(path, text.line(found.start()), name, "pin", shown, ok=ok)
        for found in self.assigned.finditer(text.text):
            name, value = found[1] or found[2], found[3].rstrip("\"'")
            if _NUMBER.match(value) and _NUMBER.match(self.versions[name]):
                self._value(path, text.line(found.start()), name, value, "value")
        self._images(text)
        self._refs(text)
        self._labels(text)

    def _images(self, text: _Text) -> None:
        for image, name in self.images.items():
            for found in _image(image).finditer(text.text) if f"{image}:" in text.text else ():
                tag, version = found["tag"], self.versions[name]
                ok = tag == version or tag.startswith((f"{version}-", f"{version}@"))
                line = text.line(found.start("tag"))
                self.add(text.path, line, name, "image", f"image {found['image']}:{tag}", ok=ok)

    def _ref(self, path: str, line: int, shown: str, name: str, ref: str) -> None:
        if _NUMBER.match(ref) and not re.fullmatch(r"[0-9a-f]{7,40}", ref):  # else a branch or a commit
            ok = ref.removeprefix("v") == self.versions[name]
            self.add(path, line, name, "git", f"{shown} at {ref}", ok=ok, expected=f"v{self.versions[name]}")

    def _repository(self, address: str) -> str | None:
        path = re.sub(r"^(?:[a-z][a-z+]*://)?(?:[^/@\s]*@)?", "", address)  # without a login, nor the user of git@host
        names = [part.removesuffix(".git") for part in re.split(r"[/:]", re.sub(r"[?#@].*$", "", path).rstrip("/"))]
        return next((part for part in names if part in self.repositories), None)

    def _refs(self, text: _Text) -> None:
        """Refs in addresses, and those that a clone or a fetch of an address names."""
        for found in _ADDRESS.finditer(text.text):
            named = without_login(found[0])
            repository = self._repository(named)
            ref = _IN_ADDRESS.search(named) or _AFTER.search(named.partition("://")[2].partition("#egg")[0])
            if repository is not None and ref is not None:
                self._ref(text.path, text.line(found.start()), repository, self.repositories[repository], ref[1])
        for found in _CLONE.finditer(text.text):
            address, branch = _ADDRESS.search(found[1]), _BRANCH.search(found[1])
            repository = self._repository(address[0]) if address else None
            if repository is not None and branch is not None:
                line = text.line(found.start(1))
                self._ref(text.path, line, repository, self.repositories[repository], branch[1])

    def _labels(self, text: _Text) -> None:
        for name, label in self.labels:
            major, _, rest = self.versions[name].partition(".")
            wanted = label.replace("{major}", major).replace("{minor}", rest.partition(".")[0])
            pattern = re.escape(label).replace(r"\{major\}", r"\d{2}").replace(r"\{minor\}", r"\d")
            for found in re.finditer(rf"(?:(?<=\+)|(?<=/)|(?<=%2B))({pattern})(?![\w.])", text.text):
                start = max(text.text.rfind(separator, 0, found.start()) for separator in " \n\t\"'") + 1
                word = re.split(r"[\s\"']", text.text[start : start + 200], maxsplit=1)[0]
                said = f"{self.versions[name]} ({name}), so {wanted}"
                wrong = "" if found[1] == wanted else f": {found[1]}, {self.versions.file} says {said}"
                line = text.line(found.start())
                self.result.occurrences.append(Occurrence(text.path, line, name, "label", without_login(word), wrong))


def _joined(path: str, raw: str, known: Mapping[str, str], first: int) -> _Text:
    """Commands without comments, continuations joined, known names filled in."""
    text, starts = "", []
    for number, row in enumerate(raw.split("\n"), first):
        starts.append((len(text), number))
        line = _filled(_without_comment(row.rstrip("\r")), known)
        text += line[:-1] + " " if line.endswith("\\") else line + "\n"
    return _Text(path, text, starts)


def _without_comment(line: str) -> str:
    if line.lstrip().startswith("#"):
        return ""
    comment = re.search(r"\s#(?=\s|$)", line)
    if comment and line.count('"', 0, comment.start()) % 2 == 0 and line.count("'", 0, comment.start()) % 2 == 0:
        return line[: comment.start()]
    return line


def _filled(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: known.get(found[1] or found[2], found[0]), text)


@lru_cache(maxsize=64)
def _image(image: str) -> re.Pattern[str]:
    host = r"(?:[A-Za-z0-9.$_{}-]+(?::\d+)?/)*"
    return re.compile(rf"(?<![\w.-])(?P<image>/?{host}{re.escape(image)}):(?P<tag>\w[\w.-]*)")


def _same(version: str, wanted: str) -> bool:
    """Whether two versions are equal; a local label is a mismatch only where the source has one too."""
    try:
        found, want = Version(version), Version(wanted)
    except InvalidVersion:
        return version == wanted
    return found == want or (want.local is None and Version(found.public) == want)
