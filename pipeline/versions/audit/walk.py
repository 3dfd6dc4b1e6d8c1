"""Which files of a tree are looked at, what each is, and what could not be read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.versions.findings import Finding
from pipeline.versions.tree import decode, is_dockerfile, ordinary, refusal

from . import readers, scripts
from .commands import WORTH
from .places import Place

Reader = Callable[[str, str], Iterator[Place]]

_NOT_OURS = frozenset({
    ".git", ".hg", ".svn", "node_modules", ".venv", "venv", "__pycache__", ".tox", ".nox", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", "site-packages", "vendor", "third_party", "3rdparty", "third-party", ".eggs", ".terraform",
})  # fmt: skip
# A fixture is not a pin; but what lies below requirements/ or docker/ is one, even for tests.
_TESTS = frozenset(
    {"test", "tests", "testing", "testdata", "test_data", "fixtures", "__tests__", "unit_tests", "mocks"}
)
_REAL = frozenset({"requirements", "docker"})
_TEMPLATES = ("j2", "jinja", "jinja2", "tmpl", "tpl", "template", "erb")  # what they render counts
_LARGEST = 1024 * 1024  # bytes
_REQUIREMENTS = re.compile(r"(?:^|[-_.])(?:requirements|constraints)[^/]*\.(?:txt|in)$", re.IGNORECASE)
_MAKE = re.compile(r"^(?:makefile|gnumakefile|.*\.mk|justfile)$", re.IGNORECASE)
_YAML = re.compile(rb"_VERSION|_version|build-args|image:|container:|" + WORTH.encode())
_CONSTANT = re.compile(rb"_VERSION")
_BAKE = re.compile(rb'variable"?\s*[":{]|target"?\s*[":{]')
_SHELL = re.compile(rb"_VERSION|" + WORTH.encode())
_SHEBANG = re.compile(rb"\A#![^\n]*\b(?:ba|da|k|z)?sh\b")


@dataclass
class Report:
    """What a look at a tree gave: places, how many files were read and passed over, and what cannot be read."""

    places: list[Place] = field(default_factory=list)
    unreadable: list[Finding] = field(default_factory=list)
    files: int = 0
    read: int = 0
    passed_over: int = 0  # binary or too large


def look(root: Path) -> Report:
    """Read every file of a tree that may hold a version; links are not followed."""
    report = Report()

    def refused(error: OSError) -> None:
        report.unreadable.append(Finding(_inside(root, str(error.filename)), 0, 0, f"cannot be read: {error.strerror}"))

    for here, folders, files in os.walk(root, onerror=refused):
        folders[:] = sorted(name for name in folders if name not in _NOT_OURS)
        inside = _inside(root, here)
        fixtures = _is_fixture(inside)
        for name in sorted(files):
            report.files += 1
            path = f"{inside}/{name}" if inside != "." else name
            chosen = None if fixtures else _reader(name, path)
            if chosen is not None:
                _one(root, path, *chosen, report)
    report.unreadable.sort()
    return report


def _inside(root: Path, path: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def _is_fixture(folder: str) -> bool:
    for part in folder.split("/"):
        if part in _REAL:
            return False
        if part.lower() in _TESTS:
            return True
    return False


def _reader(name: str, path: str) -> tuple[Reader, re.Pattern[bytes] | None] | None:
    """How to read a file, and what its bytes must hold to be worth it."""
    low = name.lower()
    end = low.rpartition(".")[2]
    chosen: tuple[Reader, re.Pattern[bytes] | None] | None = None
    if end == "py":
        if not (low.startswith("test_") or low.endswith("_test.py") or low == "conftest.py"):
            chosen = scripts.python, _CONSTANT
    elif end in ("yml", "yaml"):
        chosen = scripts.yaml, _YAML
    elif end == "hcl":
        chosen = readers.bake_hcl, _BAKE
    elif end == "json":
        if low == "versions.json" or "bake" in low:
            chosen = readers.bake_json, _BAKE
    elif end not in ("dockerignore", *_TEMPLATES) and is_dockerfile(name):
        chosen = readers.dockerfile, None
    elif _REQUIREMENTS.search(name) or (end in ("txt", "in") and "requirements" in path.split("/")[:-1]):
        chosen = readers.requirements, None
    elif low == "pyproject.toml":
        chosen = readers.pyproject, None
    elif end in ("sh", "bash", "env") or _MAKE.match(name):
        chosen = scripts.shell, _SHELL
    elif "." not in name:
        chosen = scripts.shell, _SHEBANG
    return chosen


def _one(root: Path, path: str, reader: Reader, needed: re.Pattern[bytes] | None, report: Report) -> None:
    try:
        with open(ordinary(os.path.join(root, path)), "rb") as stream:  # noqa: PTH118, PTH123 -- this is the inner loop
            if os.fstat(stream.fileno()).st_size > _LARGEST:
                report.passed_over += 1
                return
            data = stream.read()
    except OSError as error:
        report.unreadable.append(Finding(path, 0, 0, refusal(error)))
        return
    if needed is not None and needed.search(data) is None:
        report.read += 1
        return
    if b"\0" in data[:8192] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        report.passed_over += 1
        return
    report.read += 1
    text = decode(data)[0]
    try:
        report.places.extend(reader(path, text))
    except readers.NotUnderstood as error:
        report.unreadable.append(Finding(path, 0, 0, str(error)))
    except RecursionError:
        report.unreadable.append(Finding(path, _deepest(text), 0, "is nested too deeply"))


def _deepest(text: str) -> int:
    """The line on which most brackets are open."""
    open_now = most = 0
    found = line = 1
    for character in re.findall(r"[\[({\])}\n]", text):
        if character == "\n":
            line += 1
            continue
        open_now += 1 if character in "[({" else -1
        if open_now > most:
            most, found = open_now, line
    return found
