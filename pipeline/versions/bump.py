"""Move versions: edit versions.json, render, compile the locks, check it all in memory, then write all or nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from pipeline.contract.errors import DriftError, UsageError
from pipeline.contract.text import pluralize
from pipeline.run import ProcessFailed, run

from . import check, lock, source
from .findings import suggest
from .render import has_templates, render, unified, write
from .source import FILE, Versions, canonical


@dataclass(frozen=True)
class BumpRequest:
    """New values by name; names to move to the newest version; and what may happen on the way.

    `refresh` compiles every lock again; `upgrade` names packages whose pins may move (`*`: all of them).
    """

    values: Mapping[str, str]
    latest: tuple[str, ...] = ()
    refresh: bool = False
    upgrade: tuple[str, ...] = ()
    offline: bool = False


@dataclass
class Outcome:
    """What would be written: the files that change, what moved, in words, and a diff of all files but the locks."""

    files: dict[str, bytes] = field(default_factory=dict)
    moves: list[str] = field(default_factory=list)
    diff: str = ""


class BumpRefused(DriftError):
    """What the move would leave behind does not agree; nothing was written."""


def bump(root: Path, request: BumpRequest, note: Callable[[str], None]) -> Outcome:
    """Compute a move, in memory; raise `UsageError` or `BumpRefused` where it cannot be made."""
    versions = source.load(root)
    for name in (*request.values, *request.latest):
        if name not in versions:
            raise UsageError(f"{FILE} has no {name}{suggest(name, versions)}", hint=f"names: {', '.join(versions.raw)}")
    if request.offline and request.latest:
        raise UsageError("--latest asks the index for versions, --offline forbids it")
    values = {**request.values, **{name: _newest(versions, name) for name in request.latest}}
    values = _tied(versions, values)
    outcome = Outcome()
    values = {name: value for name, value in values.items() if value != versions.raw[name]}
    outcome.moves += [f"{name} {versions.raw[name]} -> {value}" for name, value in values.items()]
    text = edited(versions.text, values)
    try:
        new = source.read(text.encode())
    except source.SourceInvalid as error:
        wrong = [finding.message for finding in error.findings]
        raise UsageError(
            f"{', '.join(f'{name}={value}' for name, value in values.items())}: {wrong[0]}",
            details=wrong if len(wrong) > 1 else (),
            hint=f"nothing was written: {FILE} is as it was",
        ) from error
    files = render(root, new) if has_templates(root) else {}
    now = check.committed(root, new, files)
    stale = list(new.locks) if request.refresh or request.upgrade else lock.outdated(new, now)
    if stale and request.offline:
        raise UsageError(
            f"--offline: {pluralize(len(stale), 'lock')} must be compiled ({', '.join(stale)}), which asks the index",
            hint="what a new version requires is not known offline",
        )
    _refuse_unknown(request.upgrade, now, new)
    try:
        locks = lock.compile_locks(new, now, stale, note, upgrade=request.upgrade)
    except lock.CompileFailed as error:
        raise _with_nearest(error, new, values) from error
    now |= locks
    changed = {FILE: text.encode(), **files, **locks}
    findings = check.agreement(root, new, now, rendered={**files, **locks})
    if findings:
        raise BumpRefused(
            f"nothing was written: the tree would have {pluralize(len(findings), 'finding')}",
            details=[finding.text() for finding in sorted(set(findings))],
            hint=""
            if has_templates(root)
            else "without templates/ these places are yours to write; then run this again",
        )
    for path, data in changed.items():
        was = (root / path).read_bytes() if (root / path).exists() else b""
        if was != data:
            outcome.files[path] = data
            if path in locks:
                outcome.moves += _moved(path, was, data)
            else:
                outcome.diff += unified(path, was, data, "now", "then")
    return outcome


def _refuse_unknown(packages: tuple[str, ...], now: Mapping[str, bytes], versions: Versions) -> None:
    """Raise `UsageError` for a package to upgrade that no lock pins."""
    pinned = {name for one in map(lock.target, versions.locks) for name in lock.pinned(now.get(one, b""))}
    for package in packages:
        if package != "*" and canonical(package) not in pinned:
            raise UsageError(
                f"no lock pins {package}{suggest(package, pinned)}", hint="`--upgrade '*'` moves all of them"
            )


def write_all(root: Path, outcome: Outcome) -> None:
    """Write every file or none: what was written is put back where a later one fails."""
    before = {path: (root / path).read_bytes() if (root / path).exists() else None for path in outcome.files}
    try:
        write(root, outcome.files)
    except BaseException:
        write(root, {path: data for path, data in before.items() if data is not None})
        for path, data in before.items():
            if data is None:
                (root / path).unlink(missing_ok=True)
        raise


def _tied(versions: Versions, values: Mapping[str, str]) -> dict[str, str]:
    """The values, and those of names that must begin with one of them, or with which one of them begins."""
    tied = dict(values)
    for name, what in versions.governs.items():
        other = what.begins_with
        if other is None:
            continue
        if name in values and other not in values:
            parts = len(versions[other].split("."))
            tied[other] = ".".join(values[name].split(".")[:parts])
        elif other in values and name not in values and not source.begins(versions[name], values[other]):
            tied[name] = values[other]
    return tied


def edited(text: str, values: Mapping[str, str]) -> str:
    """versions.json with new values; its order and layout stay."""
    for name, value in values.items():
        pattern = rf'({re.escape(json.dumps(name))}\s*:\s*\{{\s*"default"\s*:\s*)"(?:[^"\\]|\\.)*"'
        text = re.sub(pattern, lambda found, value=value: found[1] + json.dumps(value), text, count=1)  # type: ignore[misc]
    return text


def available(package: str) -> list[str]:
    """The versions of a package that pip's indexes have, the newest first; empty where they do not answer."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    try:
        said = run(command, capture=True, timeout=120).stdout
    except ProcessFailed:
        return []
    found = re.search(r"Available versions: (.*)", said)
    return [version.strip() for version in found[1].split(",")] if found else []


def _newest(versions: Versions, name: str) -> str:
    governs = versions.governs.get(name)
    if governs is None or not governs.packages:
        raise UsageError(
            f"{name} decides no package's version, so no index knows its newest", hint=f"name one: {name}=…"
        )
    found = available(governs.packages[0])
    if not found:
        raise UsageError(f"the index that pip is configured for has no {governs.packages[0]}, or does not answer",
                         hint="`pip config debug` shows what pip is configured for")  # fmt: skip
    return Version(found[0]).public


def _with_nearest(error: lock.CompileFailed, versions: Versions, values: Mapping[str, str]) -> UsageError:
    """The same error; where the index lacks a version that was asked for, with the nearest that it has."""
    for name in values:
        governs = versions.governs.get(name)
        if governs is None or not governs.packages:
            continue
        has = [Version(found).public for found in available(governs.packages[0])]
        if has and Version(values[name]).public not in has:
            close = suggest(values[name], has).removeprefix("; ") or f"the newest is {has[0]}"
            return UsageError(f"the index has no {governs.packages[0]} {values[name]}: nothing was written", hint=close)
    return error


def _moved(path: str, was: bytes, now: bytes) -> list[str]:
    """What changed in a lock, a line for each package."""
    old, new = lock.pinned(was), lock.pinned(now)
    rows = []
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            rows.append(f"{path}: {name} {old.get(name, 'new')} -> {new.get(name, 'gone')}")
    return rows or [f"{path}: the same versions"]
