"""How the ratio of two tactics moves while a GPU is loaded, and from one CUDA graph to the next.

    python -m tests.gpu.two_states OUT.json [--seconds 0.6] [--graphs 12]

For products of Llama-3.1-8B and a tactic each: bursts after a pause; one load without a pause, told in slices; then many
benches of the same calls, each with new graphs. Ratios are ln(tactic / default), so below zero is faster. Run it several
times, on several GPUs: what it is about is what stays.
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

KEYS = (("o", 1536, 2), ("o", 3072, 6), ("down", 768, 2), ("down", 1280, 1), ("qkv", 2048, 7), ("down", 256, 1),
        ("gate_up", 64, 2), ("gate_up", 128, 3), ("gate_up_fp8", 1536, 1), ("down_fp8", 8, 1))  # fmt: skip


def told(rounds: Any) -> list[float]:
    """The mean logarithmic ratio, and the default's milliseconds, at the only point that is timed."""
    ratio = statistics.fmean(one[1][0] - one[0][0] for one in rounds)
    return [round(ratio, 5), round(math.exp(statistics.fmean(one[0][0] for one in rounds)), 6)]


def one_key(question: Any, tactic: int, device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one key."""
    from pipeline.tune.judging.bench import DEFAULT, Candidate, Untold
    from pipeline.tune.judging.benches import bench

    def make() -> Any:
        return bench([question], [DEFAULT, Candidate(0, tactic)], device, Untold(), 1)  # 1: one state at a time

    trial = make()
    if trial.failed:
        return {"failed": dict(trial.failed)}
    bursts = []
    for _ in range(6):
        time.sleep(0.1)
        bursts.append(told(trial.rounds([0, 1], 8)))
    time.sleep(0.3)
    began, slices = time.monotonic(), []
    while (passed := time.monotonic() - began) < options.seconds:
        slices.append([round(passed, 3), *told(trial.rounds([0, 1], 16))])
    graphs = []
    for _ in range(options.graphs):
        time.sleep(0.1)
        graphs.append(told(make().rounds([0, 1], 8)))
    return {"bursts": bursts, "load": slices, "graphs": graphs}


def main() -> None:
    """All keys, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--graphs", type=int, default=12)
    options = parser.parse_args()
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.judging.questions import questions
    from pipeline.tune.ops import adapter_of
    from pipeline.tune.tuner import ObservedTuner
    from tests.gpu.bench_h200 import both, read_plan

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    tuner = ObservedTuner({}, forbid=True)
    flashinfer_api.install(tuner)
    plan = both(read_plan("llama-3.1-8b", flashinfer_api.version()))
    ops = {op.name: op for op in plan.ops}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, tokens, tactic in KEYS:
            op = ops[name]
            case = adapter_of(op).make(op, device, plan.seed)
            question = questions(tuner, plan, op, case, tokens)[0][0]
            rows.append({"op": name, "tokens": tokens, "tactic": tactic, **one_key(question, tactic, device, options)})
            options.out.write_text(json.dumps(rows))
            print(json.dumps(rows[-1])[:300], flush=True)
            del case, question
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
    os._exit(0)
