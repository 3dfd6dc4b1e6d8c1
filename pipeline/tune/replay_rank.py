"""One rank of a replay, started by `pipeline.tune.replay`: load the key's file, call every op, measure nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache.otherkeys import OTHERS, other_keys
from pipeline.cache.tree import load_manifest
from pipeline.contract.digest import sha256_file
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import OpPlan

from . import rank as life
from .steps import Steps

if TYPE_CHECKING:
    import torch

    from .ops import Case
    from .tuner import Lookup, ObservedTuner, Question


@dataclass
class Replay:
    """What one rank replays with, and what it found; each miss and each wrong output is an object for the result."""

    tuner: ObservedTuner
    manifest: Manifest
    device: torch.device
    steps: Steps
    calls: int = 0
    hits: int = 0
    between: int = 0
    other_calls: int = 0  # the same asked as callers do whose inputs have other shapes
    other_hits: int = 0
    misses: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def fault(self, op: str, tokens: int, reason: str, **more: object) -> None:
        """Note something wrong about an op at a token count."""
        self.wrong.append({"op": op, "tokens": tokens, "reason": reason, **more})

    def replay(self, op: OpPlan) -> None:
        """Call an op at every token count of a replay."""
        from .coverage import settings
        from .ops import spec_of
        from .tokens import answering, replay_tokens

        plan = self.manifest.plan
        case = spec_of(op).make(op, self.device, plan.seed)
        rows: dict[int, list[str]] = {}
        for row in self.manifest.covered:
            if row.op == op.name:
                rows.setdefault(row.bucket, []).append(row.entry)
        with settings(plan, op, tune=False):
            for tokens in replay_tokens(op.buckets):
                self.steps.tick(f"{tokens} tokens")
                bucket = answering(op, plan, tokens)
                self._one(op, case, tokens, bucket, rows.get(bucket, []))

    def _one(self, op: OpPlan, case: Case, tokens: int, bucket: int, entries: list[str]) -> None:
        self.tuner.watch.clear()
        self.tuner.watch.questions = questions = list["Question"]()
        from .ops.reference import excess_of

        excess, error = 0.0, ""
        try:
            out = case.call(tokens)
        except Exception as failure:  # noqa: BLE001 - a tactic may fail in any way; that is a finding
            error = f"{type(failure).__name__}: {failure}"
        else:
            excess, said = excess_of(case, tokens, out)
            if said:
                log.warn(f"{op.name} at {tokens} tokens: {said}")
        self.tuner.watch.questions = None
        asked = list(self.tuner.watch.lookups)
        lookups = [one for one in asked if one.hit or tokens == bucket or op.options.get("hits") != "exact"]
        self.between += len(asked) - len(lookups)  # such a key holds the token count itself: no entry can answer
        self.calls += len(lookups)
        entry = entries[0] if entries else ""
        for lookup in lookups:
            self.hits += lookup.hit
            if not lookup.hit:
                self.misses.append({"op": op.name, "bucket": bucket, "tokens": tokens, "entry": entry or lookup.key})
            elif entries and lookup.key not in entries:
                self.fault(op.name, tokens, f"{lookup.key} answered in place of {entry}", entry=entry)
        for question in questions:
            if question.lookup in lookups and other_keys(question.lookup.key):
                self._as_others(op, tokens, bucket, self.tuner.ask_as_others(question))
        if not asked:
            self.fault(op.name, tokens, "search_cache was never asked", entry=entry)
        chosen = f"{asked[-1].runner} tactic {asked[-1].tactic}" if asked else "the op"
        if error:
            self.fault(op.name, tokens, f"{chosen} failed with {error}", entry=entry)
        elif not excess <= 1.0:
            reason = f"the output of {chosen} is wrong"
            self.fault(op.name, tokens, reason, entry=entry, excess=f"{excess:.3g} times the bound")

    def _as_others(self, op: OpPlan, tokens: int, bucket: int, lookup: Lookup) -> None:
        self.other_calls += 1
        self.other_hits += lookup.hit
        if not lookup.hit:
            miss = {"op": op.name, "bucket": bucket, "tokens": tokens, "entry": lookup.key, "caller": OTHERS}
            self.misses.append(miss)


def work(directory: Path, place: Path, steps: Steps) -> None:
    """Replay a key's directory and write this rank's result below `place`."""
    steps.say("importing torch and FlashInfer")
    import torch

    from pipeline.flashinfer.ops import is_skipped

    from . import flashinfer_api
    from .device import take_device
    from .ops.reference import BOUNDS
    from .record import differences, read_record
    from .tuner import ObservedTuner

    rank, _ = life.environment()
    manifest = load_manifest(directory / MANIFEST_FILE)
    plan = manifest.plan
    device = take_device(plan, share_gpu=True)  # nothing is measured: sharing a GPU does no harm
    tuner = ObservedTuner({}, forbid=True)
    flashinfer_api.install(tuner)
    at, found = flashinfer_api.load(), Replay(tuner, manifest, device, steps)
    record = read_record(plan.device)
    before = sha256_file(directory / CACHE_FILE)
    steps.begin()
    with at.autotune(False, cache=str(directory / CACHE_FILE)):
        for index, op in enumerate(plan.ops):
            if not is_skipped(op.op, plan.skip_ops) and rank in (op.ranks or (rank,)):
                steps.say(f"replaying {op.name} ({op.op})", op=index + 1)
                found.replay(op)
    if sha256_file(directory / CACHE_FILE) != before:
        found.fault("*", 0, "the cache file was changed by the replay")
    if tuner.watch.measured:
        found.fault("*", 0, f"{tuner.watch.measured} tactics were about to be measured: a server would tune")
    write_json(
        life.result_path(place, rank),
        {
            "rank": rank,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else record.host.cpu["model"],
            "calls": found.calls,
            "hits": found.hits,
            "between": found.between,
            "other_calls": found.other_calls,
            "other_hits": found.other_hits,
            "misses": found.misses,
            "wrong": found.wrong,
            "measured": tuner.watch.measured,
            "record": record.to_json(),
            "record_differences": differences(manifest.record, record),
            "bounds": BOUNDS,
        },
    )


def main(words: list[str]) -> int:
    """Live as a rank."""
    directory, place = Path(words[0]), Path(words[1])
    rank, _ = life.environment()
    return life.live(rank, place, lambda steps: work(directory, place, steps))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
