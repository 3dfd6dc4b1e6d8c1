"""versions.json: the only place where people write a version.

{
  "variable": {"TORCH_VERSION": {"default": "2.13.0"}, ...},    a buildx bake variable file
  "governs":  {"TORCH_VERSION": {"packages": ["torch"]}, ...},  what a name decides beside the ARG of its own name
  "locks":    {"image-cpu": {"python": "3.11", ...}, ...}       environments: requirements/NAME.in compiles to NAME.txt
}

A value may name others, `python:${PYTHON_IMAGE_VERSION}-slim`, as bake itself allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.contract.errors import UsageError
from pipeline.contract.text import pluralize

from .findings import Finding, suggest
from .requirements import read_bytes

FILE = "versions.json"
REFERENCE = re.compile(r"\$\{([^}]*)\}")
_LONGEST = 4096  # characters of a value
Problem = tuple[int, str]  # line, message

Word = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")]


class WrittenInvalid(UsageError):
    """Something that people write (`subject`) cannot be used; `findings` lists everything that is wrong with it."""

    subject, remedy = "", ""

    def __init__(self, findings: list[Finding]) -> None:
        one = len(findings) == 1
        message = findings[0].text() if one else f"{self.subject} has {pluralize(len(findings), 'error')}"
        details = () if one else tuple(finding.text() for finding in findings)
        super().__init__(message, hint=self.remedy, details=details)
        self.findings = findings


class SourceInvalid(WrittenInvalid):
    """versions.json cannot be used."""

    subject, remedy = FILE, f"correct {FILE}, then run `pipeline versions check`"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Variable(_Strict):
    default: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Governs(_Strict):
    """What a name decides beside the ARG of its own name."""

    packages: list[Word] = []  # distributions whose pins have this version
    images: list[Word] = []  # image repositories whose tags begin with it
    repositories: list[Word] = []  # last parts of git and download addresses that name it
    labels: list[Word] = []  # how local labels and index addresses spell it: cu{major}{minor}
    begins_with: Word | None = None  # another name, with whose value this one begins


class Lock(_Strict):
    """One environment: requirements/NAME.in compiles to requirements/NAME.txt."""

    python: Word  # the oldest that it is for
    system: Literal["any system", "linux"] = Field(alias="for")  # linux: one answer for x86_64 and aarch64
    glibc: Word = "2_28"  # the oldest C library that wheels may need, as in their platform tags
    cpu: bool = False  # refuse CUDA's packages, and every torch but a +cpu build
    without: list[Word] = []  # requirements of packages that this environment does not need


class _File(_Strict):
    variable: Annotated[dict[str, _Variable], Field(min_length=1)]
    governs: dict[str, Governs] | None = None
    locks: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")], Lock] = {}
    unmanaged: list[Word] = []  # ARGs named like versions that are left to whoever wrote them: UCX_*


_KEYS = [*_File.model_fields, *Governs.model_fields, "default", "python", "for", "glibc", "cpu", "without"]

# What well-known names govern in a file that has no `governs`, as those of other projects do not.
_USUAL = {
    "FLASHINFER_VERSION": Governs(packages=["flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"],
                                  repositories=["flashinfer"]),
    "TORCH_VERSION": Governs(packages=["torch"], images=["pytorch/pytorch"], repositories=["pytorch"]),
    "VLLM_VERSION": Governs(packages=["vllm"], images=["vllm/vllm-openai"], repositories=["vllm"]),
    "CUDA_VERSION": Governs(images=["nvidia/cuda"], labels=["cu{major}{minor}"]),
}  # fmt: skip


@dataclass(frozen=True)
class Versions(Mapping[str, str]):
    """Names and expanded values in the order of the file; `raw` has them as written, `lines` where they stand."""

    expanded: Mapping[str, str]
    raw: Mapping[str, str]
    lines: Mapping[str, int]
    governs: Mapping[str, Governs]
    locks: Mapping[str, Lock]
    file: str = FILE
    unmanaged: tuple[str, ...] = ()
    own: bool = True  # the file says itself what its names govern
    in_locks: tuple[str, ...] = ()  # names that the settings of locks are made of
    text: str = field(default="", repr=False)

    def __getitem__(self, name: str) -> str:
        return self.expanded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.expanded)

    def __len__(self) -> int:
        return len(self.expanded)

    def packages(self) -> Mapping[str, str]:
        """Canonical distribution name -> the name that decides its version."""
        return {canonical(package): name for name, what in self.governs.items() for package in what.packages}

    def closure(self, names: Iterable[str]) -> set[str]:
        """Names, and every name that their values are made of or must begin with."""
        found: set[str] = set()
        todo = [name for name in names if name in self.expanded]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                governs = self.governs.get(name)
                tied = [*REFERENCE.findall(self.raw[name]), governs.begins_with if governs else None]
                todo += [one for one in tied if one in self.expanded]
        return found


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_version(text: str) -> bool:
    """Whether this is a version as packages spell it: `v0.7.4` is a tag."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return text[:1].isdigit()


def begins(version: str, other: str) -> bool:
    """Whether 3.11.14 begins with 3.11: whole numbers, not characters."""
    return (version + ".").startswith(other + ".")


def load(root: Path, file: str = FILE) -> Versions:
    """Read a versions file below `root`; raise `SourceInvalid` with every problem in it, each with its line."""
    path = root / file
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        what = f"there is no {file} in {root}" if root.is_dir() else f"there is no folder {root}"
        missing = _invalid(file, [(0, what)])
        missing.hint = "run it where versions.json is, or name that folder: --root DIR"
        raise missing from None
    except OSError as error:
        raise _invalid(file, [(0, f"cannot be read: {error.strerror}")]) from None
    return read(data, file)


def read(data: bytes, file: str = FILE) -> Versions:
    """Read the bytes of a versions file; raise `SourceInvalid` with every problem."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise _invalid(file, [(1, "begins with a byte order mark, which bake refuses")])
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _invalid(file, [(data.count(b"\n", 0, error.start) + 1, "is not UTF-8 from here on")]) from None
    problems: list[Problem] = []
    document = _json(text, file, problems)
    if isinstance(document, dict):  # a comment; bake passes over it
        document = {key: value for key, value in document.items() if not key.startswith(("_", "$"))}
    try:
        whole = _File.model_validate(document)
    except ValidationError as error:
        raise _invalid(file, problems + [_refused(text, one) for one in error.errors()]) from None
    own, governs = whole.governs is not None, whole.governs
    raw = {name: variable.default for name, variable in whole.variable.items()}
    if governs is None:
        governs = {name: what for name, what in _USUAL.items() if name in raw}
    lines = {name: _line_of(text, name) for name in (*raw, *governs, *whole.locks)}
    values = _expanded(raw, lines, problems)
    problems += _unfit_values(raw, lines, may_be_empty=not own)
    problems += _unfit_governs(governs, values, lines)
    locks = {}
    for name, lock in whole.locks.items():
        python = REFERENCE.sub(lambda found: values.get(found[1], found[0]), lock.python)
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", python):
            problems.append((lines[name], f"{name} is for Python {python!r}, which is no version"))
        locks[name] = lock.model_copy(update={"python": python})
    if problems:
        raise _invalid(file, problems)
    in_locks = tuple(name for lock in whole.locks.values() for name in REFERENCE.findall(lock.python))
    return Versions(values, raw, lines, governs, locks, file, tuple(whole.unmanaged), own, in_locks, text)


def _invalid(file: str, problems: list[Problem]) -> SourceInvalid:
    return SourceInvalid([Finding(file, line, message, "source") for line, message in sorted(set(problems))])


def _json(text: str, file: str, problems: list[Problem]) -> Any:  # noqa: ANN401 - whatever the file has
    """The document; a key that is there twice is a problem, anything that is no JSON is raised."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                line = text.count("\n", 0, text.rfind(json.dumps(name))) + 1
                problems.append((line, f'"{name}" is there twice'))
            seen[name] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        trailing = text[: error.pos].rstrip().endswith(",") and text[error.pos : error.pos + 1] in ("}", "]")
        message = "a comma before a closing bracket" if trailing or "trailing comma" in error.msg else error.msg
        raise SourceInvalid([Finding(file, error.lineno, f"is not JSON: {message}", "source")]) from None
    except RecursionError:
        raise _invalid(file, [(0, "is not usable JSON: nested too deeply")]) from None


def _line_of(text: str, *keys: str) -> int:
    """The line of the deepest of some keys that the text has, each behind the one above it; 0 where there is none."""
    at = line = 0
    for key in keys:
        found = re.compile(rf"{re.escape(json.dumps(key))}\s*:").search(text, at)
        if found:
            at, line = found.end(), text.count("\n", 0, found.start()) + 1
    return line


def _refused(text: str, error: Any) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails
    where = [str(part) for part in error["loc"] if part != "[key]"]
    line = _line_of(text, *where)
    if error["type"] == "extra_forbidden":
        return line, f'unknown key "{where[-1]}"{suggest(where[-1], _KEYS)}'
    message = {
        "missing": "is missing",
        "string_type": "must be a string",
        "string_pattern_mismatch": "must be one line without control characters",
        "string_too_short": "is empty",
    }.get(error["type"], error["msg"][:1].lower() + error["msg"][1:])
    return line, f"{'.'.join(where) or 'the file'}: {message}"


def _expanded(raw: Mapping[str, str], lines: Mapping[str, int], problems: list[Problem]) -> dict[str, str]:
    """Values with the names in them replaced; a name that is unknown or leads back to itself is a problem."""
    named = {name: REFERENCE.findall(value) for name, value in raw.items()}
    for name, others in named.items():
        problems += [
            (lines[name], f"{name} names ${{{other}}}, which is not there{suggest(other, raw)}")
            for other in others
            if other not in raw
        ]
    values = dict(raw)
    try:
        for name in TopologicalSorter(named).static_order():
            if name in raw:
                values[name] = REFERENCE.sub(lambda found: values.get(found[1], ""), raw[name])
                if len(values[name]) > _LONGEST:
                    problems.append((lines[name], f"{name} is longer than {_LONGEST} characters"))
                    values[name] = values[name][:_LONGEST]
    except CycleError as error:
        circle = error.args[1][::-1]
        problems.append((lines[circle[0]], f"circular reference: {' -> '.join(circle)}"))
    return values


def _unfit_values(raw: Mapping[str, str], lines: Mapping[str, int], *, may_be_empty: bool) -> Iterator[Problem]:
    """Names that no ARG can have, and values that are none."""
    for name, value in raw.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield lines[name], f"{name!r} cannot be the name of an ARG"
        if "$" in REFERENCE.sub("", value):
            yield lines[name], f"{name}: a `$` that begins no ${{NAME}}"
        if not value and not may_be_empty:
            yield lines[name], f"variable.{name}.default: is empty"


def _unfit_governs(
    governs: Mapping[str, Governs], values: Mapping[str, str], lines: Mapping[str, int]
) -> Iterator[Problem]:
    """Governed names that are not there, packages with two of them, versions that are none or that do not fit."""
    owners: dict[str, str] = {}
    for name, what in governs.items():
        if name not in values:
            yield lines[name], f"governs: there is no variable {name}{suggest(name, values)}"
            continue
        for package in map(canonical, what.packages):
            if owners.setdefault(package, name) != name:
                yield lines[name], f"{package} is governed by {owners[package]} and by {name}"
        if what.packages and not is_version(values[name]):
            yield lines[name], f"{name} is {values[name]!r}, which is no version of a package"
        other = what.begins_with
        if other is not None and other not in values:
            yield lines[name], f"{name} begins with {other}, which is not there{suggest(other, values)}"
        elif other is not None and not begins(values[name], values[other]):
            yield lines[name], f"{name} is {values[name]}, which does not begin with {other} {values[other]}"
