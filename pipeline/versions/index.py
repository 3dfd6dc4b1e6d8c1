"""What the package index says, asked through pip, so that the user's indexes, certificates and proxies hold."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.contract.errors import UsageError
from pipeline.run import ProcessFailed, run

from .metadata import applicable
from .recorded import Recorded
from .relations import canonical

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color")
_TIMEOUT = 600.0


class IndexLacks(UsageError):
    """The index that pip is configured for does not have a package, or a version of it."""


class IndexFailed(UsageError):
    """pip could not ask the index at all."""


def available(package: str, python: str, *, pre: bool = False) -> list[str]:
    """Every version of a package that suits a Python, newest first; raise `IndexLacks` where there is none."""
    command = [*_PIP, "index", "versions", package, *_python(python), *(["--pre"] if pre else [])]
    try:
        lines = run(command, capture=True, timeout=_TIMEOUT).stdout.splitlines()
    except ProcessFailed as error:
        if any("No matching distribution" in line for line in error.details):
            hint = "`--offline` skips the look-up; `python -m pip config list` says where pip looks"
            raise IndexLacks(f"the index that pip is configured for has no {package}", hint=hint) from None
        raise IndexFailed(f"pip could not look up {package}", details=error.details, hint="see `--offline`") from None
    found = next((line.partition(":")[2] for line in lines if line.startswith("Available versions")), "")
    return [word.strip() for word in found.split(",") if word.strip()]


def _python(python: str) -> list[str]:
    """Ask for wheels of that Python, which need not be ours."""
    return ["--python-version", python, "--only-binary=:all:"] if python else []


def nearest(versions: Sequence[str], wanted: str) -> str:
    """The version of a list that is closest to one that it does not hold."""
    from packaging.version import InvalidVersion, Version

    try:
        target = Version(wanted)
        public = dict.fromkeys(version.partition("+")[0] for version in versions)  # a pin names no build
        ordered = sorted((Version(version), version) for version in public)
    except InvalidVersion:
        return versions[0] if versions else ""
    below = [version for parsed, version in ordered if parsed <= target]
    above = [version for parsed, version in ordered if parsed > target]

    def shared(version: str) -> int:
        pairs = zip(re.split(r"[.+]", version), re.split(r"[.+]", wanted), strict=False)
        count = 0
        for one, two in pairs:
            if one != two:
                break
            count += 1
        return count

    candidates = [*below[-1:], *above[:1]]
    return max(candidates, key=shared, default="")


def describe(pins: Iterable[tuple[str, tuple[str, ...], str]], python: str) -> dict[str, Recorded]:
    """What packages require, by canonical name, of `(name, extras, version)`; raise where the index has no answer.

    pip resolves nothing here: each package is looked at alone, and only as a wheel.
    """
    wanted = {canonical(name): (extras, version) for name, extras, version in pins}
    if not wanted:
        return {}
    with tempfile.TemporaryDirectory(prefix="pipeline-index-") as folder:
        report = Path(folder) / "report.json"
        command = [
            *_PIP, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report),
            "--target", str(Path(folder) / "nothing"), "--only-binary=:all:",
            *(["--python-version", python] if python else []),
            *(f"{name}=={version}" for name, (_, version) in sorted(wanted.items())),
        ]  # fmt: skip
        try:
            run(command, capture=True, timeout=_TIMEOUT)
        except ProcessFailed as error:
            lacking = next((line for line in error.details if "No matching distribution" in line), "")
            if lacking:
                raise IndexLacks(lacking.removeprefix("ERROR: "), hint="see `python -m pip config list`") from None
            raise IndexFailed("pip could not read the packages' metadata", details=error.details) from None
        answer = json.loads(report.read_text(encoding="utf-8"))
    found: dict[str, Recorded] = {}
    for item in answer.get("install", ()):
        data = item.get("metadata", {})
        name = canonical(str(data.get("name", "")))
        extras = wanted.get(name, ((), ""))[0]
        everything = Recorded(
            str(data.get("version", "")),
            extras,
            str(data.get("requires_python", "")),
            tuple(map(str, data.get("requires_dist", ()))),
        )
        found[name] = kept(everything, python)
    return found


def kept(entry: Recorded, python: str) -> Recorded:
    """A package's words without the requirements of extras that nobody asks for: there are hundreds."""
    without_extras = [text for text in entry.requires_dist if "extra" not in text.partition(";")[2]]
    asked = [str(requirement) for requirement in applicable(entry, entry.extras, python) if requirement.marker]
    chosen = dict.fromkeys([*without_extras, *(text for text in asked if "extra" in text)])
    return Recorded(entry.version, entry.extras, entry.requires_python, tuple(sorted(chosen)))
