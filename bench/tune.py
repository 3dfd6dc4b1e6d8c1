"""`python -m pipeline.tune` on two CPU ranks: beside a bare script, and sharded beside synchronized.

Runs in the interpreter of PIPELINE_TUNE_PYTHON. Runs of all kinds alternate, so that a busy machine hits all;
where others use the processors, the seconds of processors say more than the wall clock.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Times:
    """Seconds of each run: by the wall clock, and of processors, all processes that were waited for together."""

    wall: list[float]
    processor: list[float]


def alternate(commands: Sequence[Sequence[str]], env: dict[str, str]) -> list[Times]:
    """Times of each command, the commands in turn."""
    found = [Times([], []) for _ in commands]
    for _ in range(RUNS):
        for times, command in zip(found, commands, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.wall.append(once(command, env)[0])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def told(name: str, times: Times) -> tuple[float, float]:
    """Say a row of figures and return both medians."""
    wall, processor = statistics.median(times.wall), statistics.median(times.processor)
    spread = f"min {min(times.wall):.2f}, max {max(times.wall):.2f}, n={len(times.wall)}"
    say(name, f"{wall:.2f} s ({spread}), {processor:.2f} s of processors")
    return wall, processor


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
    over = [f"{(mine / bare - 1) * 100:+.1f} %" for mine, bare in zip(second, first, strict=True)]
    say("  overhead over the bare script (goal: at most 5 %)", f"{over[0]} wall, {over[1]} of processors")
    say("  sharded / synchronized, whole process", f"{third[0] / second[0]:.2f} wall")


if __name__ == "__main__":
    main()
