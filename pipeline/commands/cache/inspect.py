"""What a cache says of itself: the answer of `pipeline cache inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.cache.entrykey import op_and_runner
from pipeline.cache.read import CacheFile, inspect_cache
from pipeline.cache.store import check
from pipeline.cache.tree import walk
from pipeline.contract.errors import UsageError
from pipeline.contract.text import shown


def described(place: Path, key: str = "") -> list[dict[str, Any]]:
    """Each key below a root, or the one file, as JSON values. Raises `UsageError` where none fits."""
    if not place.is_dir():
        file = inspect_cache(place)
        return [{"key": "", "manifest": None, **_file(file), "findings": [str(one) for one in file.findings]}]
    keys = [one for one in walk(place).keys if one.key.hash.startswith(key)]
    if not keys:
        what = f"no key there begins with {key!r}" if key else f"{shown(str(place))} has no cache"
        raise UsageError(what, hint="a cache root has <version>/<arch>/<hash>/; `pipeline cache ls` lists keys")
    return [
        {
            "key": str(one.key),
            "manifest": one.manifest.to_json() if one.manifest is not None else None,
            **_file(one.file),
            "findings": [str(finding) for finding in check(one)],
        }
        for one in keys
    ]


def _file(file: CacheFile | None) -> dict[str, Any]:
    if file is None:
        return {"record": {}, "entries": {}}
    counts = Counter(op_and_runner(key) for key in file.entries)
    entries: dict[str, dict[str, int]] = {}
    for (op, runner), count in sorted(counts.items()):
        entries.setdefault(op, {})[runner] = count
    return {"record": dict(file.metadata or {}), "entries": entries}


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """One key for people."""
    manifest = found["manifest"]
    if found["key"]:
        yield found["key"]
    if manifest is not None:
        plan, host = manifest["plan"], manifest["record"]["host"]
        layout = " ".join(f"{name}={size}" for name, size in plan["layout"].items())
        device = ", ".join(dict.fromkeys(host["gpus"])) or host["cpu"].get("model", "?")
        yield f"  model     {shown(plan['model'])} ({layout}), plan {plan['digest'][:12]}"
        yield f"  device    {shown(device)}, driver {shown(host['driver'] or '?')}"
        yield f"  made      {shown(manifest['started'])} to {shown(manifest['ended'])}, {shown(manifest['strategy'])}"
        yield f"  ranks     {len(manifest['ranks'])}, {sum(rank['entries'] for rank in manifest['ranks'])} entries"
    for name, value in found["record"].items():
        yield f"  record    {shown(name, 40)} {shown(value, 80)}"
    for op, runners in found["entries"].items():
        counts = ", ".join(f"{shown(runner, 60)} {count}" for runner, count in runners.items())
        yield f"  entries   {shown(op or 'unreadable keys', 60)}: {counts}"
    for note in (manifest or {}).get("notes", ()):
        yield f"  note      {shown(note, 400)}"
    yield from (f"  UNSOUND   {finding}" for finding in found["findings"])
