"""`python -m pipeline.tune` on two CPU ranks: beside a bare script, and sharded beside synchronized.

Runs in the interpreter of PIPELINE_TUNE_PYTHON. Runs of both kinds alternate, so that a busy machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.measure import once, say
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.run import run

ROOT = Path(__file__).resolve().parents[1]
RUNS = 3
F32 = dict.fromkeys(("a", "b", "out"), "float32")
BF16 = dict.fromkeys(("a", "b", "out"), "bfloat16")


def a_plan(record: dict[str, dict[str, str] | str]) -> Plan:
    """Four products with four buckets each, which take some ten times as long as starting up."""
    shapes = ((1536, 1024), (1024, 1024), (2048, 1024), (1024, 2048))
    ops = [OpPlan(f"op{i}", "cpu_mm", {"n": n, "k": k}, F32, (1, 64, 512, 1024)) for i, (n, k) in enumerate(shapes)]
    flashinfer, arch = record["flashinfer"], record["arch"]
    assert isinstance(flashinfer, dict)
    assert isinstance(arch, str)
    return Plan("bench", "cpu", arch, flashinfer["flashinfer_version"], Layout(tp=2), tuple(ops), seed=3)


def alternate(commands: Sequence[Sequence[str]], env: dict[str, str]) -> list[list[float]]:
    """Wall seconds of each command, the commands in turn; the first turn is not counted."""
    found: list[list[float]] = [[] for _ in commands]
    for turn in range(RUNS + 1):
        for place, command in enumerate(commands):
            seconds, _ = once(command, env)
            if turn:
                found[place].append(seconds)
    return found


def told(name: str, seconds: Sequence[float]) -> float:
    """Say a row of figures and return its median."""
    median = statistics.median(seconds)
    say(name, f"{median:.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f}, n={len(seconds)})")
    return median


def main() -> None:
    """Measure; without the interpreter say so and end."""
    python = os.environ.get("PIPELINE_TUNE_PYTHON") or str(ROOT / ".venv-tune" / "bin" / "python")
    if not Path(python).exists():
        sys.exit("no interpreter with torch and FlashInfer: set PIPELINE_TUNE_PYTHON")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        env = {"PYTHONPATH": str(ROOT), "FLASHINFER_WORKSPACE_BASE": name, "GLOO_SOCKET_IFNAME": "lo",
               "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "FLASHINFER_LOGGING_LEVEL": "warning"}  # fmt: skip
        record = json.loads(run([python, "-m", "pipeline.tune.record"], env=env, capture=True).stdout)["record"]
        file = place / "plan.json"
        file.write_text(json.dumps(a_plan(record).to_json()))
        launcher = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
        bare = [*launcher, str(ROOT / "bench" / "bare_tune.py"), str(file), str(place / "bare.json")]
        ours = [python, "-m", "pipeline.tune", str(file), str(place / "out"), "--judge", "off"]
        script, plain, sharded = alternate([bare, ours, [*ours, "--strategy", "sharded"]], env)
    first = told("bare script under torchrun, two ranks, one gloo group", script)
    second = told("`python -m pipeline.tune --judge off`, synchronized", plain)
    third = told("`python -m pipeline.tune --judge off --strategy sharded`", sharded)
    say("  overhead over the bare script (goal: at most 5 %)", f"{(second / first - 1) * 100:+.1f} %")
    say("  sharded / synchronized, whole process", f"{third / second:.2f}")


if __name__ == "__main__":
    main()
