"""A fresh process that times what a tuned cache chose against FlashInfer's untuned default, side by side.

    python -m tests.gpu.measure_cache ROOT OUT.json [--untuned [COUNTS]] [--against OTHER_ROOT] [--rounds N]

Loads the cache as a server would, asks the real AutoTuner what answers each token count, and times that and the
default (the first runner's tactic -1) as CUDA graphs with cold weights, in alternating rounds. A ratio below 1 means
that the tuned choice is faster. Where the choice is the default both sides are the same: their ratio shows the noise.
From 128 tokens on both are timed at rest and under load: `ratios` holds the two, `ratio` is their geometric mean.
With --untuned, at token counts that are no bucket of the plan: those below, or others, separated by commas.
With --against, entries that differ between two caches are timed against each other instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

UNTUNED = (3, 5, 7, 12, 24, 40, 48, 96, 160, 200, 384, 640, 900, 1100, 1700, 2300, 3000, 3700, 5000, 6000, 7000)


def _pair(question: Any, mine: Any, other: Any, device: Any, rounds: int, tokens: int) -> dict[str, Any]:
    from pipeline.tune.compare import timing

    asked = timing.Asked([question], {0: other, 1: mine}, tokens)
    (answer,) = timing.time_entries(device, [asked], rounds)
    if answer.error or answer.failed:
        return {"failed": dict(answer.failed), "error": answer.error}
    batches = answer.batches
    times = [one for batch in batches for one in batch]
    states = range(len(times[0][0]))
    ratios = [statistics.median(one[1][state] - one[0][state] for one in times) for state in states]
    return {
        "ms": [round(math.exp(statistics.median(one[1][state] for one in times)), 6) for state in states],
        "other_ms": [round(math.exp(statistics.median(one[0][state] for one in times)), 6) for state in states],
        "ratio": round(math.exp(math.fsum(ratios) / len(ratios)), 6),
        "ratios": [round(math.exp(one), 6) for one in ratios],
    }


def _load(root: Path) -> tuple[Any, Any]:
    from pipeline.contract.manifest import Manifest

    (place,) = (path.parent for path in root.glob("*/*/*/manifest.json"))
    return place, Manifest.from_json(json.loads((place / "manifest.json").read_bytes()))


def loaded(root: Path) -> tuple[Any, Any, Any]:
    """FlashInfer's tuner with a cache in force, as a server has it, in which nothing may be tuned; manifest, device."""
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.tuner import ObservedTuner

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    tuner = ObservedTuner({}, forbid=True)
    flashinfer_api.install(tuner)
    place, manifest = _load(root)
    if not tuner.load_configs(str(place / "autotune_configs.json")):
        raise SystemExit("FlashInfer does not load this cache here")
    return tuner, manifest, device


def _questions(manifest: Any, device: Any, tuner: Any, tokens_of: Any) -> Any:
    """(op, tokens, question) for every count, with the loaded cache in force."""
    from pipeline.tune.coverage import settings
    from pipeline.tune.ops import spec_of

    for op in manifest.plan.ops:
        case = spec_of(op).make(op, device, manifest.plan.seed)
        with settings(manifest.plan, op, tune=False):
            for tokens in tokens_of(op):
                tuner.watch.clear()
                tuner.watch.questions = []
                case.call(tokens)
                for question in tuner.watch.questions:
                    yield op, tokens, question
                tuner.watch.questions = None
        del case


def main() -> None:
    """Measure one cache, or two against each other."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.measure_cache")
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--untuned", nargs="?", default=None, const=UNTUNED, metavar="COUNTS",
                        type=lambda text: tuple(int(count) for count in text.split(",")))  # fmt: skip
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    began = time.monotonic()
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.compare.timing import DEFAULT, Candidate

    tuner, manifest, device = loaded(options.root)
    ready = time.monotonic() - began
    rows: list[dict[str, Any]] = []
    others: dict[tuple[str, int], Any] = {}
    if options.against is not None:
        mine = {(row.op, row.bucket): (row.runner, row.tactic) for row in manifest.covered}
        theirs = {(row.op, row.bucket): (row.runner, row.tactic) for row in _load(options.against)[1].covered}
        others = {key: theirs[key] for key in mine if mine[key] != theirs[key]}

    def counts(op: Any) -> list[int]:
        if options.against is not None:
            return [bucket for bucket in op.buckets if (op.name, bucket) in others]
        if options.untuned:
            return [tokens for tokens in options.untuned if tokens < op.buckets[-1] and tokens not in op.buckets]
        return list(op.buckets)

    with torch.no_grad():
        for op, tokens, question in _questions(manifest, device, tuner, counts):
            names = [type(runner).__name__ for runner in question.runners]
            lookup = question.lookup
            chosen = (
                Candidate(names.index(lookup.runner), flashinfer_api.tactic_of(lookup.tactic))
                if lookup.hit
                else DEFAULT
            )
            other = DEFAULT
            if options.against is not None:
                runner, tactic = others[op.name, tokens]
                other = Candidate(names.index(runner), flashinfer_api.tactic_of(tactic))
            found = _pair(question, chosen, other, device, options.rounds, tokens)
            rows.append({"op": op.name, "kind": op.op, "tokens": tokens, "hit": lookup.hit, "runner": lookup.runner,
                         "tactic": lookup.tactic, "other": [other.runner, other.tactic], **found})  # fmt: skip
    told = {"rows": rows, "ready_seconds": round(ready, 3), "seconds": round(time.monotonic() - began, 3)}
    options.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
    os._exit(0)
