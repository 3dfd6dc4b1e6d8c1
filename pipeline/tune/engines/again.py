"""`python -m pipeline.tune.engines.again --key KEY`: the engine's start once more, on the offered copy.

Run below `pipeline-run` in the finished image. The engine must look where the copy lies, and hold afterwards exactly
the entries that were baked: one that it tuned again would be another, or be new. Prints one JSON object, as
`pipeline.tune.replay` does: `calls` counts the baked entries, `hits` those that stand as they were.

What this cannot see: an engine whose autotune is off leaves the copy as it was, and looks no different.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.cache.enginefiles import group_of, layout_described
from pipeline.cache.layouts import layout_of
from pipeline.cache.layouts.collected import Collected, collect
from pipeline.cache.layouts.group import Group
from pipeline.cache.tree import read_key, sums
from pipeline.contract.errors import CacheRefused, PipelineError
from pipeline.contract.exits import Exit
from pipeline.contract.key import Key
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR
from pipeline.tune.record import differences
from pipeline.tune.supervise import temporary

from .apart import record_apart
from .serve import lay_config, ready

_SHOWN = 20


class NoEngineKey(CacheRefused):
    """The key was not made by an engine, or cannot be read."""


class AgainFailed(CacheRefused):
    """The engine does not live from the cache; every finding is among the details."""


def again(root: Path, key: str, *, max_wait: float) -> dict[str, Any]:
    """Start the engine of a key and say what became of the offered copy."""
    stored = read_key(root, Key.parse(key))
    manifest = stored.manifest
    baked = group_of(stored, manifest) if manifest is not None else None
    if manifest is None or manifest.plan.engine is None or baked is None:
        raise NoEngineKey(f"{key} was not made by an engine", hint="`python -m pipeline.tune.replay` replays others")
    before = sums(stored.path)
    told: dict[str, Any] = {"misses": [], "wrong": [], "record_differences": _record_differences(manifest)}
    was = collect(baked, len(manifest.ranks))
    offered = os.environ.get(str(layout_described(manifest).get("variable")), "")
    if not offered:
        told["misses"].append("the entry point offered the engine no copy; its own line says why")
    else:
        lay_config(manifest.plan.engine)
        with temporary() as work, ready(manifest.plan.engine, {}, work / "engine.log", max_wait) as seconds:
            log.note(f"{manifest.plan.engine.name} was ready after {seconds:.1f} s")
        told["misses"] += _misses(manifest, baked, Path(offered), was)
    if sums(stored.path) != before:
        told["wrong"].append("the baked files were changed by the engine")
    calls = len(was.entries)
    return {"calls": calls, "hits": max(0, calls - len(told["misses"])), **told}


def _misses(manifest: Manifest, baked: Group, offered: Path, was: Collected) -> list[str]:
    """What the engine did not take from the copy, or has that was not in it."""
    groups = layout_of(baked.layout).gather(str(offered))
    others = [group.directory for group in groups if group.directory != baked.directory]
    said = [f"the engine looked elsewhere: it made {directory}, {baked.directory} is baked" for directory in others]
    group = next((group for group in groups if group.directory == baked.directory), None)
    if group is None:
        return [*said, f"the engine removed {baked.directory}"]
    now = collect(group, len(manifest.ranks))
    for key in sorted({*was.entries, *now.entries}):
        one, two = was.entries.get(key), now.entries.get(key)
        if one is None:
            said.append(f"tuned at start, not baked: {key}")
        elif two is None:
            said.append(f"baked and gone: {key}")
        elif (one.runner, one.tactic) != (two.runner, two.tactic):
            said.append(f"tuned again: {key}")
    if len(now.files) != len(was.files):
        said.append(f"{len(was.files)} files are baked, {len(now.files)} lie there after the start")
    return said


def _record_differences(manifest: Manifest) -> list[dict[str, Any]]:
    return differences(manifest.record, record_apart())


def main(words: list[str] | None = None) -> int:
    """Arguments and exit codes, nothing else."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.tune.engines.again", description=__doc__.splitlines()[0])
    parser.add_argument("--key", required=True)
    parser.add_argument("--max-wait", type=float, default=1200.0, metavar="S", help="bound of its start, seconds")
    options = parser.parse_args(words)
    began = time.monotonic()
    try:
        told = again(Path(os.environ.get(ENV_CACHE_DIR) or CACHE_ROOT), options.key, max_wait=options.max_wait)
        told["seconds"] = round(time.monotonic() - began, 3)
        print(json.dumps(told), flush=True)  # noqa: T201 - data
        lines = [*told["misses"], *told["wrong"]]
        lines += [f"{d['field']} is {d['here']!r} here, was {d['tuned']!r}" for d in told["record_differences"]]
        if lines:
            raise AgainFailed(f"{len(lines)} findings: {lines[0]}", details=lines[:_SHOWN], hint="tune again")
        log.note(f"all {told['calls']} entries stand as they were baked, and none is new")
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
