"""`python -m pipeline.tune` on CPU ranks: beside a bare script, sharded beside synchronized, and on 2, 4 and 8 ranks.

Runs in the interpreter of PIPELINE_TUNE_PYTHON. Runs of all kinds alternate, and each is compared with the run beside
it, so that a busy machine hits both; where others use the processors, the seconds of processors say more than the
wall clock.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.measure import once, say
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.run import run

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
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


def alternate(commands: Sequence[Sequence[str]], env: dict[str, str], runs: int = RUNS) -> list[Times]:
    """Times of each command, the commands in turn."""
    found = [Times([], []) for _ in commands]
    for _ in range(runs):
        for times, command in zip(found, commands, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.wall.append(once(command, env)[0])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def paired(mine: Times, other: Times) -> tuple[float, float]:
    """Medians of the ratios of runs that lay beside each other: by the wall clock, and of processors."""
    wall = statistics.median(a / b for a, b in zip(mine.wall, other.wall, strict=True))
    return wall, statistics.median(a / b for a, b in zip(mine.processor, other.processor, strict=True))


def told(name: str, times: Times) -> None:
    """Say a row of figures."""
    wall, processor = statistics.median(times.wall), statistics.median(times.processor)
    spread = f"min {min(times.wall):.2f}, max {max(times.wall):.2f}, n={len(times.wall)}"
    say(name, f"{wall:.2f} s ({spread}), {processor:.2f} s of processors")


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
        tune = [python, "-m", "pipeline.tune", str(file), str(place / "out")]
        ours = [*tune, "--compare", "off"]
        judged = [*tune, "--compare-budget", "4"]
        script, plain, sharded = alternate([bare, ours, [*ours, "--strategy", "sharded"]], env)
        both, dealt = alternate([judged, [*judged, "--strategy", "sharded"]], env, runs=1)
        few = [many_ranks(python, place, record, ranks) for ranks in (2, 4, 8)]
        counts = alternate(few, env, runs=1)
    told("bare script under torchrun, two ranks, one gloo group", script)
    told("`python -m pipeline.tune --compare off`, synchronized", plain)
    told("`python -m pipeline.tune --compare off --strategy sharded`", sharded)
    over = [f"{(ratio - 1) * 100:+.1f} %" for ratio in paired(plain, script)]
    say("  overhead over the bare script (goal: at most 5 %)", f"{over[0]} wall, {over[1]} of processors, paired")
    say("  sharded / synchronized, whole process", f"{paired(sharded, plain)[0]:.2f} wall, paired")
    told("judged, synchronized", both)
    told("judged, sharded", dealt)
    say("  sharded / synchronized, judged, whole process", f"{paired(dealt, both)[0]:.2f} wall")
    for ranks, times in zip((2, 4, 8), counts, strict=True):
        told(f"a small plan on {ranks} ranks, contract, tuning and saving", times)


def many_ranks(python: str, place: Path, record: dict[str, dict[str, str] | str], ranks: int) -> list[str]:
    """The command that tunes a small product on so many ranks."""
    whole = a_plan(record)
    ops = [replace(op, shape={"n": 256, "k": 128}, buckets=(1, 8)) for op in whole.ops[:1]]
    file = place / f"plan-{ranks}.json"
    file.write_text(json.dumps(replace(whole, layout=Layout(tp=ranks), ops=tuple(ops)).to_json()))
    return [python, "-m", "pipeline.tune", str(file), str(place / f"out-{ranks}"), "--compare", "off"]


if __name__ == "__main__":
    main()
