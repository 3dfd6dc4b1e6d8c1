"""Prove that a tuned cache answers everything: fresh ranks, the real AutoTuner, nothing measured.

    python -m pipeline.tune.replay [--root DIR] [--key KEY] [--out FILE]

Starts as many ranks as were tuned, waits for them, joins what they found, prints one JSON object on stdout and ends
with 0 or 7. Standard library only; the ranks are `pipeline.tune.replay_rank`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline import log
from pipeline.cache.otherkeys import OTHERS
from pipeline.cache.tree import Stored, find_keys, read_key
from pipeline.contract.commandline import Parser, path, seconds
from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import CacheRefused, PipelineError, UsageError, WarmUpError
from pipeline.contract.exits import Exit
from pipeline.contract.files import write_json
from pipeline.contract.key import Key
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR

_SHOWN = 20


class KeyUnclear(CacheRefused):
    """There is no cache below the root, or more than one and none was chosen."""


class CacheUnsound(CacheRefused):
    """The key's directory cannot be read as a cache."""


class ReplayBroken(CacheRefused):
    """A rank of the replay crashed or hung."""


class ResultUnwritten(UsageError):
    """The file for the result cannot be written."""


class ReplayFailed(CacheRefused):
    """The cache does not answer everything, or answers wrongly."""


def find_root(chosen: Path | None) -> Path:
    """The cache root: the argument, else the environment's override, else where images keep it."""
    return chosen or Path(os.environ.get(ENV_CACHE_DIR) or CACHE_ROOT)


def open_key(root: Path, chosen: str | None) -> Stored:
    """Read one key's directory strictly; raise `KeyUnclear`, `KeyInvalid` or `CacheUnsound`."""
    keys = find_keys(root)
    key = Key.parse(chosen) if chosen else keys[0] if len(keys) == 1 else None
    if key is None or key not in keys:
        found = [str(one) for one in keys]
        what = f"has no key {chosen}" if chosen else f"holds {len(keys)} keys"
        raise KeyUnclear(f"{root} {what}", details=found, hint=f"choose with --key, or --root / {ENV_CACHE_DIR}")
    stored = read_key(root, key)
    if stored.file is None or stored.manifest is None or stored.file.findings:
        lines = [str(finding) for finding in stored.findings]
        raise CacheUnsound(f"{key}: {lines[0] if lines else 'not a cache'}", details=lines, hint="tune again")
    return stored


def join(results: Sequence[dict[str, Any]], manifest: Manifest) -> dict[str, Any]:
    """One object from what all ranks found; the same miss on several ranks is told once, with the ranks."""
    first = results[0]
    return {
        "key": manifest.key,
        "device": first["device"],
        "ranks": len(results),
        "calls": sum(r["calls"] for r in results),
        "hits": sum(r["hits"] for r in results),
        "between": sum(r["between"] for r in results),  # lookups that no entry of an exact key can answer
        # The same lookups as callers make whose inputs have other shapes, where that is another key
        "other_calls": sum(r["other_calls"] for r in results),
        "other_hits": sum(r["other_hits"] for r in results),
        "misses": _together([(r["rank"], miss) for r in results for miss in r["misses"]]),
        "wrong": _together([(r["rank"], wrong) for r in results for wrong in r["wrong"]]),
        "record": first["record"],
        "record_differences": _together([(r["rank"], d) for r in results for d in r["record_differences"]]),
        "measured": sum(r["measured"] for r in results),
        "bounds": first["bounds"],
    }


def _together(found: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    joined: dict[str, dict[str, Any]] = {}
    for rank, one in found:
        # The size of an error differs from run to run; what it is about does not.
        same = json.dumps({k: v for k, v in one.items() if k != "excess"}, sort_keys=True)
        joined.setdefault(same, {**one, "ranks": []})["ranks"].append(rank)
    return list(joined.values())


def failures(told: dict[str, Any]) -> list[str]:
    """Every reason to refuse the cache, in words."""
    lines = [
        f"{m['op']} at {m['tokens']} tokens (bucket {m['bucket']}): no entry answers"
        + (f" {m['caller']}" if m.get("caller") else "")
        + f"; expected {m['entry']}"
        for m in told["misses"]
    ]
    lines += [f"{w['op']} at {w['tokens']} tokens: {w['reason']}" for w in told["wrong"]]
    lines += [f"{d['field']} is {d['here']!r} here, was {d['tuned']!r}" for d in told["record_differences"]]
    if told["calls"] == 0:
        lines.append("search_cache was never asked: the plan calls nothing")
    return lines


def replay(root: Path, chosen: str | None, timeout: float) -> dict[str, Any]:
    """Run the replay and return its result; raise `ReplayBroken` when ranks crash or hang."""
    from .rank import result_path
    from .supervise import Crew, environment, supervise, temporary

    began = time.monotonic()
    stored = open_key(root, chosen)
    assert stored.manifest is not None
    nproc = len(stored.manifest.ranks) or stored.manifest.plan.layout.world
    before = sha256_file(stored.cache_path)
    with temporary() as work, log.step(f"replay {stored.key} on {nproc} ranks"):
        words = [sys.executable, "-m", "pipeline.tune.replay_rank", str(stored.path.resolve()), str(work)]
        commands = [
            (words, {**environment(work), "RANK": str(rank), "WORLD_SIZE": str(nproc)}) for rank in range(nproc)
        ]
        try:
            supervise(Crew(nproc, timeout, work, launched=False), commands)
        except WarmUpError as error:
            raise ReplayBroken(error.message, details=error.details, hint="the cache was not proved") from error
        results = [json.loads(result_path(work, rank).read_bytes()) for rank in range(nproc)]
    told = join(results, stored.manifest)
    if sha256_file(stored.cache_path) != before:
        reason = "the cache file was changed by the replay"
        told["wrong"].append({"op": "*", "tokens": 0, "reason": reason, "ranks": []})
    return {**told, "seconds": round(time.monotonic() - began, 3)}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pipeline.tune.replay",
        description="Prove that a tuned cache answers every op at every bucket.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=path, metavar="DIR", help=f"directory above <version>/ (else {ENV_CACHE_DIR})")
    parser.add_argument("--key", metavar="KEY", help="<version>/<arch>/<hash>; needed where there are several")
    parser.add_argument("--out", type=path, metavar="FILE", help="also write the result there")
    parser.add_argument("--timeout", type=seconds, default=300, metavar="S", help="bound on a rank's silence, seconds")
    return parser


def _write(place: Path, told: dict[str, Any]) -> None:
    try:
        write_json(place, told)
    except OSError as error:
        raise ResultUnwritten(
            f"--out {place}: {error.strerror}", hint="name a file that this user may write"
        ) from error


def main(words: list[str] | None = None) -> int:
    """Replay, print the result, and turn it into an exit code."""

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        arguments = _parser().parse_args(words)
        told = replay(find_root(arguments.root), arguments.key, arguments.timeout)
        print(json.dumps(told), flush=True)  # noqa: T201 - data
        if arguments.out is not None:
            _write(arguments.out, told)
        lines = failures(told)
        if lines:
            raise ReplayFailed(f"{len(lines)} findings: {lines[0]}", details=lines[:_SHOWN], hint="tune again")
        others = f", {told['other_hits']} of {told['other_calls']} for {OTHERS}" if told["other_calls"] else ""
        log.note(f"{told['hits']} of {told['calls']} lookups hit{others}, nothing was measured, every output is right")
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        log.note("interrupted")
        return int(Exit.INTERRUPTED)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
