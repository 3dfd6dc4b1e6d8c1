"""FlashInfer's autotune cache file, as its `AutoTuner.save_configs` writes it.

    {"_metadata": {name: text}, "<key>": [runner, tactic], …}                                    0.6
    {"_metadata": …, "_records": {…}, "<key>": [runner, tactic, policy, selection], …,
     "_generation": "<sha256>"}                                                                  0.7

`inspect_cache` reports all that is wrong with a file; `read_cache` refuses it. Neither needs FlashInfer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.contract.errors import CacheRefused
from pipeline.contract.strictjson import LIMIT, parse_object, read_bytes
from pipeline.contract.text import shown

from . import finding
from .finding import Finding, Tally, lines

METADATA = "_metadata"
RECORDS = "_records"
GENERATION = "_generation"
NEVER_WILD = ("gpu", "flashinfer_version")  # a cache of another GPU or FlashInfer is never of use

_TACTICS = frozenset({list, int, str, bool, float})


class CacheUnsound(CacheRefused):
    """A cache file that must not be used; every reason is among the details."""


class Entry(NamedTuple):
    """What answers for one key: the runner's class name and the tactic, lists where FlashInfer has tuples.

    `policy` (how it was measured) and `selection` (`time_ms`, `runner_up_ms`, `margin`, `candidates`) exist
    from 0.7 on. A tuple, since a file has ten thousand.
    """

    runner: str
    tactic: Any
    policy: tuple[Any, ...] | None = None
    selection: Mapping[str, Any] | None = None

    @property
    def time_ms(self) -> float | None:
        """The winner's time in milliseconds, where the file has it."""
        value = (self.selection or {}).get("time_ms")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
            return None
        return float(value)

    @property
    def dropped(self) -> bool:
        """Whether FlashInfer leaves it out while loading: an integer as the plan of a cuDNN runner."""
        return self.runner.startswith("Cudnn") and isinstance(self.tactic, int) and self.tactic >= 0


@dataclass(frozen=True)
class CacheFile:
    """One cache file. `metadata` is None where the file has none; `extras` has `_records` and `_generation`.

    `findings` is empty for a sound file. Malformed entries are reported there and are not among `entries`.
    """

    metadata: Mapping[str, Any] | None
    entries: Mapping[str, Entry]
    extras: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def usable(self) -> int:
        """How many entries FlashInfer would have after loading the file."""
        return sum(1 for entry in self.entries.values() if not entry.dropped)


def inspect_cache(source: bytes | Path, *, where: str = "", limit: int = LIMIT) -> CacheFile:
    """Read a file of at most `limit` bytes and report all that is wrong with it.

    Raises `FileMissing` when there is no file, and `Unreadable` (not a regular file, too large, not UTF-8, not JSON,
    not an object, nested too deeply) when its bytes are no cache at all.
    """
    where = where or (shown(str(source)) if isinstance(source, Path) else "the cache file")
    data = read_bytes(source, limit) if isinstance(source, Path) else source
    value, defects = parse_object(data, where, limit)
    return _cache_file(value, where, [Finding(where, one.what, "", one.because) for one in defects])


def read_cache(source: bytes | Path, *, where: str = "", limit: int = LIMIT) -> CacheFile:
    """Read a sound file; raise as `inspect_cache` does, and `CacheUnsound` with every reason for an unsound one."""
    file = inspect_cache(source, where=where, limit=limit)
    if file.findings:
        raise CacheUnsound(
            f"{where or 'the cache file'} must not be used: {finding.because(file.findings)}",
            hint="tune again, and bake what the tuner wrote",
            details=lines(file.findings),
        )
    return file


def spelled(entry: Entry) -> list[Any]:
    """An entry as FlashInfer's file has it."""
    value: list[Any] = [entry.runner, entry.tactic]
    if entry.policy is not None:
        value.append(list(entry.policy))
        if entry.selection is not None:
            value.append(dict(entry.selection))
    return value


def _cache_file(value: dict[str, Any], where: str, found: list[Finding]) -> CacheFile:
    metadata = value.pop(METADATA, None)
    if metadata is None:  # FlashInfer takes null like a missing record
        found.append(Finding(where, "has no _metadata", "tune again", finding.NO_METADATA))
    elif not isinstance(metadata, dict):
        found.append(Finding(where, f"_metadata is {shown(metadata, 40)}", "tune again", finding.BAD_METADATA))
        metadata = {}
    extras = {name: value.pop(name) for name in (RECORDS, GENERATION) if name in value}
    if not isinstance(extras.get(RECORDS, {}), dict):
        found.append(Finding(where, f"_records is {shown(extras[RECORDS], 40)}", "tune again", finding.BAD_RECORDS))
    entries: dict[str, Entry] = {}
    malformed = Tally(found, where, finding.BAD_ENTRY, "tune again")
    for key, raw in value.items():
        if type(raw) is list and len(raw) == 2 and raw[0] and type(raw[0]) is str and type(raw[1]) in _TACTICS:
            entries[key] = Entry(raw[0], raw[1])
        elif wrong := _wrong_entry(raw):
            malformed.add(lambda key=key, wrong=wrong: f"entry {shown(key)} {wrong}")  # type: ignore[misc]
        else:
            policy = tuple(raw[2]) if len(raw) > 2 else None
            entries[key] = Entry(raw[0], raw[1], policy, raw[3] if len(raw) > 3 else None)
    malformed.close()
    never = [name for name in NEVER_WILD if metadata and metadata.get(name) == "*"]
    found += [
        Finding(where, f"{name} is '*': FlashInfer would not compare it", "tune again", f"{name} {finding.WILDCARD}")
        for name in never
    ]
    dropped = Tally(found, where, finding.DROPPED, "tune again with a FlashInfer that saves cuDNN's plans")
    for key, entry in entries.items():
        if entry.dropped:
            dropped.add(lambda key=key: f"entry {shown(key)} has an integer as its cuDNN plan")  # type: ignore[misc]
    dropped.close()
    if not value or (entries and all(entry.dropped for entry in entries.values())):
        what = "has no entries" if not value else "has only entries that FlashInfer drops while loading"
        found.append(Finding(where, what, "tune again: nothing was tuned", finding.NO_ENTRIES))
    return CacheFile(metadata, entries, extras, tuple(found))


def _wrong_entry(raw: object) -> str:
    """Say what keeps a value from being an entry; empty when it is one."""
    if not isinstance(raw, list) or not 2 <= len(raw) <= 4:
        return "is not [runner, tactic]"
    if not isinstance(raw[0], str) or not raw[0]:
        return f"has {shown(raw[0], 40)} as its runner"
    if raw[1] is None or isinstance(raw[1], dict):
        return f"has {shown(raw[1], 40)} as its tactic"
    if len(raw) > 2 and not isinstance(raw[2], list):
        return f"has {shown(raw[2], 40)} as its measurement policy"
    if len(raw) > 3 and not isinstance(raw[3], dict):
        return f"has {shown(raw[3], 40)} as its selection record"
    return ""
