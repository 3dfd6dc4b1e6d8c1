"""Prove that a tuned cache answers everything: fresh ranks, the real AutoTuner, nothing measured.

    python -m pipeline.tune.replay [--root DIR] [--key KEY] [--out FILE]

Starts as many ranks as were tuned, waits for them, joins what they found, prints one JSON object on stdout and ends
with 0 or 7. Each rank loads the key's file and calls every op. Standard library only, but for the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache import otherkeys
from pipeline.cache.tree import Stored, find_keys, load_manifest, read_key
from pipeline.contract.commandline import Parser, path, seconds
from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import CacheRefused, Exit, PipelineError, UsageError, WarmUpError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_FILE, CACHE_ROOT, ENV_CACHE_DIR, MANIFEST_FILE
from pipeline.contract.plan import OpPlan
from pipeline.contract.record import Key

from .steps import Steps, result_path
from .worker import live

if TYPE_CHECKING:
    from .ops import Case
    from .tuner import Lookup, ObservedTuner, Question

_SHOWN = 20


# ── a rank ──


@dataclass
class Found:
    """What one rank found; each miss and each wrong output is an object for the result."""

    rank: int
    device: str
    record: dict[str, Any]
    record_differences: list[dict[str, Any]]
    calls: int = 0
    hits: int = 0
    between: int = 0  # lookups that no entry of an exact key can answer
    other_calls: int = 0  # the same lookups as callers make whose inputs have other shapes, where that is another key
    other_hits: int = 0
    measured: int = 0
    misses: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def fault(self, op: str, tokens: int, reason: str, **more: object) -> None:
        """Note something wrong about an op at a token count."""
        self.wrong.append({"op": op, "tokens": tokens, "reason": reason, **more})


@dataclass(frozen=True)
class _Replayed:
    """One op of the plan on this rank; `entries` are the keys that answered each bucket when it was tuned."""

    tuner: ObservedTuner
    manifest: Manifest
    op: OpPlan
    case: Case
    found: Found

    def call_all(self, steps: Steps) -> None:
        """Call the op at every token count of a replay."""
        from .coverage import settings
        from .tokens import answering, replay_tokens

        op, plan = self.op, self.manifest.plan
        rows = [row for row in self.manifest.covered if row.op == op.name]
        with settings(plan, op, tune=False):
            for tokens in replay_tokens(op.buckets):
                steps.tick(f"{tokens} tokens")
                bucket = answering(op, plan, tokens)
                self._call(tokens, bucket, [row.entry for row in rows if row.bucket == bucket])

    def _call(self, tokens: int, bucket: int, entries: list[str]) -> None:
        from .ops.reference import excess_of

        op, found, watch = self.op, self.found, self.tuner.watch
        watch.clear()
        watch.questions = questions = list["Question"]()
        excess, error = 0.0, ""
        try:
            out = self.case.call(tokens)
        except Exception as failure:  # noqa: BLE001 - a tactic may fail in any way; that is a finding
            error = f"{type(failure).__name__}: {failure}"
        else:
            excess, said = excess_of(self.case, tokens, out)
            if said:
                log.warn(f"{op.name} at {tokens} tokens: {said}")
        watch.questions = None
        asked = list(watch.lookups)
        lookups = [one for one in asked if one.hit or tokens == bucket or op.options.get("hits") != "exact"]
        found.between += len(asked) - len(lookups)  # such a key holds the token count itself: no entry can answer
        found.calls += len(lookups)
        entry = entries[0] if entries else ""
        for lookup in lookups:
            found.hits += lookup.hit
            if not lookup.hit:
                found.misses.append({"op": op.name, "bucket": bucket, "tokens": tokens, "entry": entry or lookup.key})
            elif entries and lookup.key not in entries:
                found.fault(op.name, tokens, f"{lookup.key} was hit instead of {entry}", entry=entry)
        for question in questions:
            if question.lookup in lookups and otherkeys.other_keys(question.lookup.key):
                self._as_others(tokens, bucket, self.tuner.ask_as_others(question))
        if not asked:
            found.fault(op.name, tokens, "search_cache was never called", entry=entry)
        chosen = f"{asked[-1].runner} tactic {asked[-1].tactic}" if asked else "the op"
        if error:
            found.fault(op.name, tokens, f"{chosen} failed with {error}", entry=entry)
        elif not excess <= 1.0:
            reason = f"the output of {chosen} is wrong"
            found.fault(op.name, tokens, reason, entry=entry, excess=f"{excess:.3g} times the bound")

    def _as_others(self, tokens: int, bucket: int, lookup: Lookup) -> None:
        self.found.other_calls += 1
        self.found.other_hits += lookup.hit
        if not lookup.hit:
            miss = {
                "op": self.op.name,
                "bucket": bucket,
                "tokens": tokens,
                "entry": lookup.key,
                "caller": otherkeys.OTHERS,
            }
            self.found.misses.append(miss)


def replay_rank(directory: Path, place: Path, steps: Steps) -> None:
    """Replay a key's directory on this rank, and write what it found below `place`."""
    import torch

    from pipeline.flashinfer.ops import is_skipped

    from . import flashinfer_api
    from .ops import spec_of
    from .record import differences, read_record
    from .session import take_device
    from .tuner import ObservedTuner

    rank = int(os.environ["RANK"])
    manifest = load_manifest(directory / MANIFEST_FILE)
    plan, file = manifest.plan, directory / CACHE_FILE
    device = take_device(plan, share_gpu=True)  # nothing is measured: sharing a GPU does no harm
    tuner = ObservedTuner({}, forbid=True)
    flashinfer_api.install(tuner)
    record = read_record(plan.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else record.host.cpu["model"]
    found = Found(rank, name, record.to_json(), differences(manifest.record, record))
    before = sha256_file(file)
    steps.begin()
    with flashinfer_api.load().autotune(False, cache=str(file)):
        for index, op in enumerate(plan.ops):
            if not is_skipped(op.op, plan.skip_ops) and rank in (op.ranks or (rank,)):
                steps.say(f"replaying {op.name} ({op.op})", op=index + 1)
                case = spec_of(op).make(op, device, plan.seed)
                _Replayed(tuner, manifest, op, case, found).call_all(steps)
    if sha256_file(file) != before:
        found.fault("*", 0, "the cache file was changed by the replay")
    found.measured = tuner.watch.measured
    if found.measured:
        found.fault("*", 0, f"{found.measured} tactics were about to be measured: a server would tune")
    write_json(result_path(place, rank), asdict(found))


# ── all ranks ──


def open_key(root: Path, chosen: str | None) -> Stored:
    """Read one key's directory strictly; raise `CacheRefused`, or `KeyInvalid` for what is no key."""
    keys = find_keys(root)
    key = Key.parse(chosen) if chosen else keys[0] if len(keys) == 1 else None
    if key is None or key not in keys:
        what = f"has no key {chosen}" if chosen else f"contains {len(keys)} keys"
        hint = f"choose with --key, or --root / {ENV_CACHE_DIR}"
        raise CacheRefused(f"{root} {what}", details=[str(one) for one in keys], hint=hint)
    stored = read_key(root, key)
    if stored.file is None or stored.manifest is None or stored.file.findings:
        lines = [str(finding) for finding in stored.findings]
        raise CacheRefused(f"{key}: {lines[0] if lines else 'not a cache'}", details=lines, hint="tune again")
    return stored


def join(results: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """One object from what all ranks found; a miss that several ranks had is listed once, with the ranks."""
    counts = ("calls", "hits", "between", "other_calls", "other_hits", "measured")
    return {
        "key": key,
        "device": results[0]["device"],
        "ranks": len(results),
        **{name: sum(one[name] for one in results) for name in counts},
        **{
            name: _together([(one["rank"], what) for one in results for what in one[name]])
            for name in ("misses", "wrong", "record_differences")
        },
        "record": results[0]["record"],
    }


def _together(found: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What several ranks found, each thing once with its ranks."""
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
        lines.append("search_cache was never called: the plan calls nothing")
    return lines


def replay(root: Path, chosen: str | None, timeout: float) -> dict[str, Any]:
    """Run the replay and return its result; raise `CacheRefused` when ranks crash or hang."""
    from .supervisor import Launch, environment, python, supervise, temporary

    began = time.monotonic()
    stored = open_key(root, chosen)
    assert stored.manifest is not None
    nproc = len(stored.manifest.ranks) or stored.manifest.plan.layout.world
    with temporary() as work, log.step(f"replay {stored.key} on {nproc} ranks"):
        command = python("pipeline.tune.replay", str(stored.path.resolve()), str(work), "--rank")
        try:
            supervise(Launch(nproc, timeout, work), command, environment(work))
        except WarmUpError as error:
            raise CacheRefused(error.message, details=error.details, hint="the replay did not pass") from error
        results = [json.loads(result_path(work, rank).read_bytes()) for rank in range(nproc)]
    return {**join(results, stored.manifest.key), "seconds": round(time.monotonic() - began, 3)}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pipeline.tune.replay",
        description="Prove that a tuned cache has a hit for every op at every bucket.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=path, metavar="DIR", help=f"directory above <version>/ (else {ENV_CACHE_DIR})")
    parser.add_argument("--key", metavar="KEY", help="<version>/<arch>/<hash>; needed where there are several")
    parser.add_argument("--out", type=path, metavar="FILE", help="also write the result there")
    parser.add_argument("--timeout", type=seconds, default=300, metavar="S", help="timeout of a silent rank, in s")
    return parser


def main(words: list[str] | None = None) -> int:
    """Replay, print the result, and turn it into an exit code."""

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        arguments = _parser().parse_args(words)
        root = arguments.root or Path(os.environ.get(ENV_CACHE_DIR) or CACHE_ROOT)
        told = replay(root, arguments.key, arguments.timeout)
        print(json.dumps(told), flush=True)  # noqa: T201 - data
        if arguments.out is not None:
            try:
                write_json(arguments.out, told)
            except OSError as error:
                hint = "name a file that this user may write"
                raise UsageError(f"--out {arguments.out}: {error.strerror}", hint=hint) from error
        lines = failures(told)
        if lines:
            raise CacheRefused(f"{len(lines)} findings: {lines[0]}", details=lines[:_SHOWN], hint="tune again")
        others = (
            f", {told['other_hits']} of {told['other_calls']} for {otherkeys.OTHERS}" if told["other_calls"] else ""
        )
        log.note(f"{told['hits']} of {told['calls']} lookups hit{others}, nothing was measured, every output is right")
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        log.note("interrupted")
        return int(Exit.INTERRUPTED)
    return int(Exit.OK)


if __name__ == "__main__":
    if sys.argv[-1] == "--rank":
        directory, place = map(Path, sys.argv[1:3])
        os._exit(live(int(os.environ["RANK"]), place, lambda steps: replay_rank(directory, place, steps)))
    sys.exit(main())
