"""The first pass of a serving process over a plan's ops, in one of four ways; prints its times as one line of JSON.

    python first_pass.py tuned|tune|default|bare PLAN [FILE]

`tuned` loads the baked cache, `tune` measures every tactic first as a server without a cache does, `default` takes
FlashInfer's untuned defaults. `bare` hands FILE to FlashInfer itself and looks at nothing else, in a process outside
any container: the floor.
"""

from __future__ import annotations

import argparse
import json
import time

BEGAN = time.perf_counter()
TOKENS = (1, 3, 17, 100, 333, 1000, 4000)


def main(mode: str, place: str, file: str = "") -> None:
    """Import, load or tune, run each op at seven token counts, and say what took how long (seconds)."""
    from pathlib import Path

    import torch
    from flashinfer.autotuner import autotune

    from pipeline.contract.plan import Plan
    from pipeline.tune.ops import spec_of
    from pipeline.tune.runtime import tuned

    plan = Plan.from_json(json.loads(Path(place).read_text(encoding="utf-8")))
    device = torch.device("cuda", 0) if plan.device == "cuda" else torch.device("cpu")
    imported = time.perf_counter()
    cases = [(op, spec_of(op).make(op, device, plan.seed)) for op in plan.ops]

    def run(case: object, tokens: int) -> None:
        case.call(tokens)  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    entries = 0
    if mode == "tuned":
        with tuned(require=True) as loaded:
            entries = loaded.entries if loaded is not None else 0
            first = _pass(cases, run)
    elif mode == "tune":
        for op, case in cases:
            with autotune(True, tuning_buckets=tuple(op.buckets), round_up=plan.round_up):
                run(case, max(op.buckets))
        first = _pass(cases, run)
    elif mode == "bare":
        with autotune(False, cache=file, tuning_buckets=tuple(plan.ops[0].buckets), round_up=plan.round_up):
            first = _pass(cases, run)
    else:
        first = _pass(cases, run)
    ended = time.perf_counter()
    told = {"mode": mode, "entries": entries, "imports": imported - BEGAN, "total": ended - BEGAN, "pass": first}
    print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in told.items()}), flush=True)


def _pass(cases: list, run: object) -> float:  # type: ignore[type-arg]
    began = time.perf_counter()
    for op, case in cases:
        for tokens in TOKENS:
            if tokens <= max(op.buckets):
                run(case, tokens)  # type: ignore[operator]
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("tuned", "tune", "default", "bare"))
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument("file", nargs="?", default="", metavar="FILE")
    options = parser.parse_args()
    main(options.mode, options.plan, options.file)
