"""`python -m pipeline.tune` on two CPU ranks: beside a bare script, sharded beside synchronized, compared and not.

Runs in the interpreter of PIPELINE_TUNE_PYTHON. Runs alternate, and each is compared with the run beside it. Where
others use the processors, the seconds of processors say more than the wall clock.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.measure import Figures, alternate, say
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.run import run

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
F32 = dict.fromkeys(("a", "b", "out"), "float32")
SHAPES = ((1536, 1024), (1024, 1024), (2048, 1024), (1024, 2048))


def a_plan(arch: str, version: str) -> Plan:
    """Four products with four buckets each, which take some ten times as long as starting up."""
    ops = [OpPlan(f"op{i}", "cpu_mm", {"n": n, "k": k}, F32, (1, 64, 512, 1024)) for i, (n, k) in enumerate(SHAPES)]
    return Plan("bench", "cpu", arch, version, Layout(tp=2), tuple(ops), seed=3)


def ratio(mine: Figures, other: Figures) -> str:
    """Medians of the ratios of runs that lay beside each other."""
    wall = statistics.median(a / b for a, b in zip(mine.seconds, other.seconds, strict=True))
    processors = statistics.median(a / b for a, b in zip(mine.processors, other.processors, strict=True))
    return f"{wall:.3f} by the wall clock, {processors:.3f} of processors, paired"


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
        file.write_text(json.dumps(a_plan(record["arch"], record["flashinfer"]["flashinfer_version"]).to_json()))
        launcher = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
        bare = [*launcher, str(ROOT / "bench" / "bare_tune.py"), str(file), str(place / "bare.json")]
        tune = [python, "-m", "pipeline.tune", str(file), str(place / "out"), "--compare"]
        sharded = ("--strategy", "sharded")
        script, plain, dealt = alternate([bare, [*tune, "off"], [*tune, "off", *sharded]], RUNS, env)
        both, both_dealt = alternate([[*tune, "on"], [*tune, "on", *sharded]], 1, env)
    say("bare script under torchrun, two ranks, one gloo group", script)
    say("`python -m pipeline.tune --compare off`, synchronized", plain)
    say("  over the bare script (goal: at most 1.05)", ratio(plain, script))
    say("`python -m pipeline.tune --compare off --strategy sharded`", dealt)
    say("  over synchronized", ratio(dealt, plain))
    say("compared, synchronized", both)
    say("compared, sharded", both_dealt)
