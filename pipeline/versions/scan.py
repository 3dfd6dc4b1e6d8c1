"""Where versions stand in a tree: ARGs, pins, bake files, image tags, git refs, addresses, assignments, labels.

Commands are read by patterns, not as a shell: comments go, continuations are joined, `$NAME` becomes what an ARG or
ENV says, and directories are not followed.
"""

from __future__ import annotations

import fnmatch
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from .dockerfile import Arg, held
from .dockerfile import read as read_dockerfile
from .findings import Finding
from .requirements import Pin, decode, read, read_text
from .source import Versions, canonical

_LARGEST = 4 << 20  # bytes of a file that is read
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
_CHECKOUT = re.compile(r"\bgit\s+(?:-\S+\s+\S+\s+)*(?:checkout|switch|reset|fetch)\b([^;&|\n]*)")
_DIRECTORY = re.compile(r"(?<![\w-])(?:cd|pushd)\s+[\"']?([^\s;&|\"')]+)")
_LIKE_VERSION = re.compile(r".*_VERSION", re.IGNORECASE)
_NUMBER = re.compile(r"v?\d")
_LineOf = Callable[[int], int]


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
        return [Finding(path, line, 0, message, kind) for (path, line, message), kind in said.items()] + self.findings


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
    locked = {f"requirements/{name}.txt" for name in versions.locks}
    for path in sorted({*files(root), *(rendered or {})}):
        data = rendered[path] if rendered and path in rendered else _bytes(root, path, result)
        if data is None:
            continue
        try:
            text = decode(data)
        except UnicodeError:
            if _is_read(path):
                result.findings.append(
                    Finding(path, 0, 0, "is not text in UTF-8, nor in an encoding that it names", "read")
                )
            continue
        if path in locked:
            scanner.pins(read_text(text, path).pins)
        elif _is_requirements(path):
            found = read_text(text, path) if rendered and path in rendered else read(root, path)
            scanner.pins([pin for pin in found.pins if pin.path == path])
            result.findings += [problem for problem in found.problems if problem.path == path]
            scanner.text(path, re.sub(r"(?m)^[^-].*", "", text))  # options: addresses of indexes
        elif _is_dockerfile(path, text):
            scanner.dockerfile(path, text)
        else:
            if _is_bake(path):
                scanner.bake(path, text)
            scanner.text(path, text)
    result.occurrences = list(dict.fromkeys(sorted(result.occurrences)))
    return result


def _bytes(root: Path, path: str, result: Scan) -> bytes | None:
    place = root / path
    try:
        if not place.resolve().is_relative_to(root.resolve()):
            raise OSError(0, "a link out of the tree")
        if not place.is_file():
            raise OSError(0, "no ordinary file")
        if place.stat().st_size > _LARGEST:
            if not _is_read(path):
                return None
            raise OSError(0, "larger than 4 MiB")
        data = place.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link in a circle
        why = error.strerror if isinstance(error, OSError) else "a link in a circle"
        result.findings.append(Finding(path, 0, 0, f"cannot be read: {why}", "read"))
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


def _is_dockerfile(path: str, text: str) -> bool:
    name = path.rpartition("/")[2]
    if "ockerfile" in name:
        return not name.endswith((".dockerignore", ".hcl", ".json", ".sh", ".py"))
    first = re.search(r"(?m)^[ \t]*(ARG|FROM)[ \t]+\S", text)
    return (
        "." in name
        and not name.endswith((".sh", ".py", ".hcl", ".json", ".yaml", ".yml", ".txt", ".in"))
        and bool(first and re.search(r"(?mi)^[ \t]*FROM[ \t]+\S", text))
    )


class _Scanner:
    def __init__(self, versions: Versions, result: Scan) -> None:
        self.versions = versions
        self.result = result
        self.packages = versions.packages()
        governs = versions.governs
        self.images = {image: name for name, what in governs.items() for image in what.images}
        self.repositories = {one: name for name, what in governs.items() for one in what.repositories}
        self.repositories |= {p: n for n, what in governs.items() for p in what.packages if p not in self.repositories}
        names = "|".join(map(re.escape, versions))
        value = r"([^\s\"'$`;&|,)}\]<>\\]{1,200})"
        # NAME=1, NAME: "1", NAME ?= 1, NAME: str = "1", -DNAME=1, NAME=${X:-1}, ${NAME:-1}, get("NAME", "1")
        self.assigned = re.compile(
            rf"(?:(?:(?<![\w$./{{-])|(?<=-D))({names})\\?[\"']?\s*(?:[:?+]?=|:\s*str\s*=|:|,|\)\s*or)[ \t]*\\?[\"']?"
            rf"(?:\$\{{\w+:?[-=])?|\$\{{({names}):?[-=]){value}"
        )
        self.unmanaged: set[tuple[str, str]] = set()  # path and name: said once
        self.labels = [(name, label) for name, what in governs.items() for label in what.labels]

    def add(self, path: str, line: int, name: str, kind: str, text: str, *, ok: bool, expected: str = "") -> None:
        value = expected or self.versions[name]
        said = "" if kind in ("ARG", "bake", "value") else f" ({name})"
        wrong = "" if ok else f", {self.versions.file} says {value}{said}"
        self.result.occurrences.append(Occurrence(path, line, name, kind, text, wrong))

    # -- ARGs and bake files

    def dockerfile(self, path: str, text: str) -> None:
        found = read_dockerfile(text)
        for problem in found.problems:
            message = f"BuildKit refuses this: {problem.message}"
            self.result.findings.append(Finding(path, problem.line, 0, message, "ARG"))
        for arg in [*found.args, *held(found)]:
            self._arg(path, arg)
        for stage in found.stages:
            self._images(path, stage.base, lambda _at, line=stage.line: line)  # type: ignore[misc]
        lines = text.removeprefix("\ufeff").split("\n")
        for instruction, known in zip(found.instructions, found.known, strict=True):
            if instruction.name in ("FROM", "ARG", "LABEL", "CMD", "ENTRYPOINT"):
                continue
            first, last = instruction.start_line, instruction.end_line
            block = "\n".join(lines[first - 1 : last])
            if instruction.name == "ENV":
                for name, value in zip(instruction.args[::3], instruction.args[1::3], strict=True):
                    if name in self.versions:
                        self._value(path, first, name, _filled(value.strip("\"'"), known), "value")
            elif instruction.name != "ONBUILD":
                self.text(path, block, known, first)

    def _arg(self, path: str, arg: Arg) -> None:
        shown = f"ARG {arg.name}" + ("" if arg.raw is None else f"={arg.raw if arg.value is None else arg.value}")
        if arg.name in self.versions:
            if arg.raw is not None:
                value = self.versions[arg.name]
                self.add(path, arg.line, arg.name, "ARG", shown, ok=arg.value == value)
            else:
                self.add(path, arg.line, arg.name, "ARG", shown, ok=True)
        elif self._unmanaged(arg.name) and (path, arg.name) not in self.unmanaged:
            if any(one in self.versions for one in re.findall(r"\$\{?(\w+)", arg.raw or "")):
                return  # made of a managed one
            self.unmanaged.add((path, arg.name))
            message = f"{shown} is not managed: {self.versions.file} has no {arg.name}{self._spelled(arg.name)}"
            self.result.findings.append(Finding(path, arg.line, 0, message, "ARG"))
        elif arg.value and re.search(r"_(?:REF|TAG|BRANCH)$", arg.name):
            name = next((n for r, n in self.repositories.items() if arg.name.lower().startswith(canonical(r))), None)
            if name is not None:
                self._ref(path, arg.line, arg.name, name, arg.value)

    def _spelled(self, name: str) -> str:
        return next((f"; did you mean {one}?" for one in self.versions if one.lower() == name.lower()), "")

    def _unmanaged(self, name: str) -> bool:
        """Whether an ARG is named like a version, and neither managed nor left to whoever wrote it."""
        known = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.versions.unmanaged)
        return self.versions.own and not known and bool(_LIKE_VERSION.fullmatch(name))

    def bake(self, path: str, text: str) -> None:
        """Variables and their defaults, of HCL and of JSON, quoted or not; arguments are read as assignments."""
        for pattern in (
            r'variable\s+"(\w+)"\s*\{[^{}]*?\bdefault\s*=\s*"?([^"\s{}]*)"?',
            r'"(\w+)"\s*:\s*\{\s*"default"\s*:\s*"?([^",\s{}]*)"?',
            r'"(\w+)"\s*:\s*"?([^",\s{}\[\]]+)"?',
        ):
            for found in re.finditer(pattern, text):
                line = text.count("\n", 0, found.end()) + 1
                if found[1] in self.versions:
                    value = re.sub(r"\$\{(\w+)\}", lambda m: self.versions.get(m[1], m[0]), found[2])
                    if "$" not in value:
                        self._value(path, line, found[1], value, "bake")
                elif self._unmanaged(found[1]) and "variable" in pattern:
                    message = f"variable {found[1]}={found[2]} is not managed: {self.versions.file} has no {found[1]}"
                    self.result.findings.append(Finding(path, line, 0, message, "bake"))

    def _value(self, path: str, line: int, name: str, value: str, kind: str) -> None:
        if value != name:  # bake: an argument that is the variable of its own name
            self.add(path, line, name, kind, f"{name}={value}", ok=value == self.versions[name])

    # -- pins

    def pins(self, pins: list[Pin]) -> None:
        """Requirements of a file: a governed one must be a pin, of that version."""
        for pin in pins:
            name = self.packages.get(pin.name or "")
            shown = f"{pin.name or ''}{pin.specifier}"
            if name is not None and pin.url and not pin.version:
                found = _AFTER.search(pin.url.partition("#egg")[0].partition("://")[2])
                if found:
                    self._ref(pin.path, pin.line, pin.name or "", name, found[1])
                else:
                    self.add(pin.path, pin.line, name, "pin", f"{pin.name} @ {pin.url}: no version", ok=False)
            elif name is not None:
                version = pin.version or _one_of(pin.specifier)
                ok = version is not None and _same(version, self.versions[name])
                said = shown if version is not None else f"{shown} is not pinned"
                self.add(pin.path, pin.line, name, "pin", said, ok=ok)
            self._labels(pin.path, f"{pin.url} {shown}", lambda _at, line=pin.line: line)  # type: ignore[misc]

    # -- text

    def text(self, path: str, raw: str, known: Mapping[str, str] | None = None, first: int = 1) -> None:
        """Everything that patterns find in commands and settings."""
        text, starts = _joined(raw, {**(known or {}), **_assigned_once(raw)}, first)

        def line_of(at: int) -> int:
            return starts[bisect_right(starts, (at, 1 << 60)) - 1][1]

        for found in _PIN.finditer(text):
            name = self.packages.get(canonical(found[1]))
            if name is not None:
                shown = f"{found[1]}{'@' if '@' in found[0] else '=='}{found[2]}"
                self.add(path, line_of(found.start()), name, "pin", shown, ok=_same(found[2], self.versions[name]))
        for found in self.assigned.finditer(text):
            name, value = found[1] or found[2], found[3].rstrip("\"'")
            if _NUMBER.match(value) and _NUMBER.match(self.versions[name]):
                self._value(path, line_of(found.start()), name, value, "value")
        for found in _ARCHIVED.finditer(text):
            name = self.packages.get(canonical(found[1]))
            if name is not None:
                version = found[2].replace("%2B", "+").replace("%2b", "+")
                self.add(
                    path,
                    line_of(found.start()),
                    name,
                    "pin",
                    f"{found[1]}-{version}",
                    ok=_same(version, self.versions[name]),
                )
        self._images(path, text, line_of)
        self._refs(path, text, line_of)
        self._labels(path, text, line_of)

    def _images(self, path: str, text: str, line_of: _LineOf) -> None:
        for image, name in self.images.items():
            for found in _image(image).finditer(text) if f"{image}:" in text else ():
                tag = found["tag"]
                ok = tag == self.versions[name] or tag.startswith(
                    (f"{self.versions[name]}-", f"{self.versions[name]}@")
                )
                self.add(path, line_of(found.start("tag")), name, "image", f"image {found['image']}:{tag}", ok=ok)

    def _ref(self, path: str, line: int, shown: str, name: str, ref: str) -> None:
        if not _NUMBER.match(ref) or re.fullmatch(r"[0-9a-f]{7,40}", ref):
            return  # a branch or a commit
        expected = self.versions.governs[name].git_ref.replace("{}", self.versions[name])
        self.add(path, line, name, "git", f"{shown} at {ref}", ok=ref == expected, expected=expected)

    def _repository(self, address: str) -> str | None:
        last = re.sub(r"[?#@].*$", "", address.partition("://")[2] or address).rstrip("/")
        names = [part.removesuffix(".git") for part in re.split(r"[/:]", last)]
        return next((part for part in names if part in self.repositories), None)

    def _refs(self, path: str, text: str, line_of: _LineOf) -> None:
        for found in _ADDRESS.finditer(text):
            repository = self._repository(found[0])
            ref = _IN_ADDRESS.search(found[0]) or _AFTER.search(found[0].partition("://")[2].partition("#egg")[0])
            if repository is not None and ref is not None:
                self._ref(path, line_of(found.start()), repository, self.repositories[repository], ref[1])
        where: tuple[int, str | None] = (0, None)  # how far the text was read, and the repository that one is in
        events = [*_CLONE.finditer(text), *_CHECKOUT.finditer(text), *_DIRECTORY.finditer(text)]
        for found in sorted(events, key=lambda event: (event.start(), event.re is not _CLONE)):
            if found.re is _DIRECTORY:
                inside = self._repository(found[1])
                where = (found.end(), inside or (where[1] if re.fullmatch(r"[./-]*", found[1]) else None))
                continue
            address = next((m[0] for m in _ADDRESS.finditer(found[1])), None)
            if address is not None:
                where = (found.end(), self._repository(address))
            path_of = re.search(r"-C\s+(\S+)|--work-tree=(\S+)", found[0])
            repository = (self._repository(path_of[1] or path_of[2]) if path_of else None) or where[1]
            if repository is None:
                continue
            branch = _BRANCH.search(found[1])
            words = [word for word in found[1].split() if not word.startswith("-")]
            plain = [] if found.re is _CLONE else [re.sub(r"^(refs/)?tags/", "", word) for word in words]
            for tag in [branch[1]] if branch and found.re is _CLONE else plain[:3]:
                self._ref(path, line_of(found.start(1)), repository, self.repositories[repository], tag.strip("\"'"))

    def _labels(self, path: str, text: str, line_of: _LineOf) -> None:
        for name, label in self.labels:
            wanted = _label(label, self.versions[name])
            pattern = re.escape(label).replace(r"\{major\}", r"\d{2}").replace(r"\{minor\}", r"\d")
            for found in re.finditer(rf"(?:(?<=\+)|(?<=/whl/)|(?<=/)|(?<=%2B))({pattern})(?![\w.])", text):
                word = _word_at(text, found.start())
                said = f"{self.versions[name]} ({name}), so {wanted}"
                wrong = "" if found[1] == wanted else f": {found[1]}, {self.versions.file} says {said}"
                self.result.occurrences.append(Occurrence(path, line_of(found.start()), name, "label", word, wrong))


def _joined(raw: str, known: Mapping[str, str], first: int) -> tuple[str, list[tuple[int, int]]]:
    """Commands without comments, continuations joined, known names filled in; offsets at which lines begin."""
    text, starts = "", []
    for number, row in enumerate(raw.split("\n"), first):
        starts.append((len(text), number))
        line = _filled(_without_inert(row.rstrip("\r")), known)
        text += line[:-1] + " " if line.endswith("\\") else line + "\n"
    return text, starts


def _assigned_once(text: str) -> dict[str, str]:
    """Names of a script that are given one plain value and no other."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"(?m)(?:^|[\s;&|])(?:export\s+)?([A-Za-z_]\w*)=([^\s;&|]*)", text):
        plain = value.strip("\"'")
        found[name] = "" if name in found or not re.fullmatch(r"[\w.:/@+-]+", plain) else plain
    return {name: value for name, value in found.items() if value}


def _without_inert(line: str) -> str:
    """A line without what does nothing: comments, a printed `usage: …`, what `grep -v` drops."""
    if line.lstrip().startswith("#") or re.search(
        r"^\s*(?:echo|printf)\b[^>|]*\busage\b[^>|]*(?:>&2.*)?$", line, re.IGNORECASE
    ):
        return ""
    comment = re.search(r"\s#(?=\s|$)", line)
    if comment and line.count('"', 0, comment.start()) % 2 == 0 and line.count("'", 0, comment.start()) % 2 == 0:
        line = line[: comment.start()]
    return re.sub(r"\bgrep\s+-\w*v\w*\s+(?:\"[^\"]*\"|'[^']*'|\S+)", "", line)


def _filled(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: known.get(found[1] or found[2], found[0]), text)


@lru_cache(maxsize=64)
def _image(image: str) -> re.Pattern[str]:
    host = r"(?:[A-Za-z0-9.$_{}-]+(?::\d+)?/)*"
    return re.compile(rf"(?<![\w.-])(?P<image>/?{host}{re.escape(image)}):(?P<tag>\w[\w.-]*)")


def _label(label: str, version: str) -> str:
    major, _, rest = version.partition(".")
    return label.replace("{major}", major).replace("{minor}", rest.partition(".")[0])


def _word_at(text: str, at: int) -> str:
    start = max(text.rfind(separator, 0, at) for separator in " \n\t\"'") + 1
    return re.split(r"[\s\"']", text[start:], maxsplit=1)[0][:200]


def _one_of(specifier: str) -> str | None:
    """The version of `==1.2`, where nothing else is asked for but that some build is not taken (`!=1.2+cpu`)."""
    parts = [part for part in specifier.split(",") if not part.startswith("!=")]
    found = re.fullmatch(r"={2,3}\s*([^*\s]+)", parts[0]) if len(parts) == 1 else None
    return found[1] if found else None


def _same(version: str, wanted: str) -> bool:
    """Whether two versions are equal; a local label is a mismatch only where the source has one too."""
    try:
        found, want = Version(version), Version(wanted)
    except InvalidVersion:
        return version == wanted
    return found == want or (want.local is None and Version(found.public) == want)
