"""What one GPU of compute capability 9.0 shows: plan, tune, replay in fresh processes, and the numbers.

    python -m tests.gpu.bench_h200 OUT [--smoke|--brief|--pair|--three|--once|--octets|--large|--hang] [--seconds 520] …

Needs torch, FlashInfer, nvcc and ninja. Every step is a process of its own with a bound; one that fails is noted and
the next begins. OUT gets results.json, written anew after each step, log.txt, and the manifests. Plans lie beside this
file; made by `pipeline plan <model> --arch 90a --ops qkv,o,gate_up,down -o …`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.contract.plan import Layout, OpPlan, Plan

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAULTS = ROOT / "tests" / "tune" / "faults"
STATES = ("at rest", "under load")
BETWEEN = (
    3,
    5,
    6,
    10,
    13,
    19,
    22,
    27,
    37,
    45,
    51,
    60,
    69,
    77,
    90,
    101,
    117,
    125,
    139,
    155,
    171,
    187,
    203,
    219,
    235,
    251,
)
FP8 = {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "bfloat16"}


@dataclass
class Bench:
    """Where results go, until when steps may begin, and more words for every tuning."""

    out: Path
    work: Path
    workspace: Path
    words: tuple[str, ...]
    deadline: float
    only: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, words: Sequence[object], bound: float, **env: str) -> Any:
        """Run one process; note how it ended, how long it took, and the JSON on its last line of output."""
        left = self.deadline - time.monotonic()
        if left < 15:
            self.note(name, {"status": "not begun: no time left"})
            return None
        began = time.monotonic()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                p for p in (env.pop("first", ""), str(ROOT), os.environ.get("PYTHONPATH", "")) if p
            ),
            "FLASHINFER_WORKSPACE_BASE": str(self.workspace),
            **env,
        }
        try:
            done = subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, env=environment, text=True,
                                  capture_output=True, timeout=min(bound, left), check=False)  # fmt: skip
            status: Any = done.returncode
            stdout, stderr = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            status = "timeout"
            stdout, stderr = (
                s.decode(errors="replace") if isinstance(s, bytes) else s or "" for s in (error.stdout, error.stderr)
            )
        told: Any = None
        if stdout.strip().startswith("{"):
            try:
                told = json.loads(stdout.strip().splitlines()[-1])
            except ValueError:
                told = None
        self.note(name, {"status": status, "seconds": round(time.monotonic() - began, 3), "told": told})
        with (self.out / "log.txt").open("a") as stream:
            stream.write(f"\n===== {name}: {status}\n{stderr[-6000:]}\n")
        return told

    def note(self, name: str, value: Any) -> None:
        """Add to results.json."""
        self.results[name] = value
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1))
        text = json.dumps(value)
        print(f"{name}: {text[:300]}", flush=True)

    def keep(self, name: str) -> None:
        """Take a tuned cache's manifest along."""
        for path in (self.work / name).glob("*/*/*/manifest.json"):
            value = json.loads(path.read_bytes())
            rows = [{k: row[k] for k in ("op", "bucket", "runner", "tactic", "time_ms", "default_ms", "ratio", "spread",
                                         "decided_by", "candidates", "note")} for row in value["covered"]]  # fmt: skip
            told = {k: value[k] for k in ("key", "options", "modules", "blocked", "notes", "ranks", "record")}
            (self.out / f"{name}.json").write_text(json.dumps({**told, "covered": rows}))


def read_plan(name: str, version: str) -> Plan:
    """A plan beside this file, for the FlashInfer that is installed."""
    plan = Plan.from_json(json.loads((HERE / "plans" / f"{name}.json").read_bytes()))
    exact = version < "0.7.4"
    ops = tuple(replace(op, options={**{k: v for k, v in op.options.items() if k != "hits"},
                                     **({"hits": "exact"} if exact and op.op == "mm_bf16" else {})}) for op in plan.ops)  # fmt: skip
    return replace(plan, flashinfer_version=version, ops=ops)


def both(plan: Plan) -> Plan:
    """The products of a bf16 plan, and the same in fp8."""
    fp8 = tuple(
        replace(op, name=f"{op.name}_fp8", op="bmm_fp8", dtypes=FP8, backends=("cublas",), options={})
        for op in plan.ops
    )
    return replace(plan, model=f"{plan.model} in bf16 and fp8", ops=(*plan.ops, *fp8))


def small(version: str, ranks: int, buckets: tuple[int, ...]) -> Plan:
    """Two small products."""
    exact = {"hits": "exact"} if version < "0.7.4" else {}
    shape = {"n": 2048, "k": 2048}
    ops = (
        OpPlan(
            "bf16",
            "mm_bf16",
            shape,
            {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"},
            buckets,
            ("cublaslt", "tinygemm"),
            exact,
        ),
        OpPlan("fp8", "bmm_fp8", shape, FP8, buckets, ("cublas",)),
    )
    return Plan("small", "cuda", "90a", version, Layout(tp=ranks), ops, seed=3)


def write(plan: Plan, path: Path) -> Path:
    """plan.json."""
    path.write_text(json.dumps(plan.to_json()))
    return path


def numbers(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Geometric mean, worst and best of default over tuned: above 1 is faster than untuned.

    The mean is over both states of the clock, worst and best are of either.
    """
    found = [row for row in rows if row["kind"] == kind and "ratio" in row]
    if not found:
        return {}
    means = sorted(1 / row["ratio"] for row in found)
    ends = sorted((1 / ratio, f"{row['op']} at {row['tokens']}, {state}")
                  for row in found for ratio, state in zip(row["ratios"], STATES, strict=False))  # fmt: skip
    moved = [1 / ratio for row in found if row["tactic"] != -1 for ratio in row["ratios"]]
    return {
        "count": len(found),
        "geometric_mean": round(geometric(means), 5),
        "by_state": {state: round(geometric([1 / row["ratios"][place] for row in found if len(row["ratios"]) > place]), 5)
                     for place, state in enumerate(STATES)},
        "median": round(means[len(means) // 2], 5),
        "worst": [[round(gain, 5), name] for gain, name in ends[:3]],
        "best": [round(ends[-1][0], 5), ends[-1][1]],
        "left_default": sum(row["tactic"] != -1 for row in found),
        "worst_of_those": round(min(moved), 5) if moved else None,
        "hits": sum(row["hit"] for row in found),
    }  # fmt: skip


def geometric(gains: Sequence[float]) -> float:
    """The geometric mean; 1 of nothing, so that what no time was left for does not end a run."""
    return statistics.geometric_mean(gains) if gains else 1.0


def differing(one: Path, other: Path) -> dict[str, Any]:
    """How many entries two caches answer differently."""
    read = [{(row["op"], row["bucket"]): [row["runner"], row["tactic"]] for row in json.loads(path.read_bytes())["covered"]}
            for path in (one, other)]  # fmt: skip
    changed = [f"{op} at {bucket}: {read[0][op, bucket]} {read[1][op, bucket]}" for op, bucket in read[0]
               if read[0][op, bucket] != read[1][op, bucket]]  # fmt: skip
    return {"of": len(read[0]), "differ": len(changed), "which": changed}


def tune(bench: Bench, plan: Path, name: str, *words: object, bound: float = 240) -> None:
    """One tuning run into its own directory."""
    shutil.rmtree(bench.work / name, ignore_errors=True)  # what an earlier run left would be taken for this one's
    (bench.out / f"{name}.json").unlink(missing_ok=True)
    bench.step(f"tune {name}", ["pipeline.tune", plan, bench.work / name, *words, *bench.words], bound)
    bench.keep(name)


def measure(bench: Bench, name: str, label: str, *words: object, bound: float = 90) -> list[dict[str, Any]]:
    """Time a cache in a fresh process; note the summary."""
    path = bench.work / f"{label}.json"
    path.unlink(missing_ok=True)
    bench.step(f"process {label}", ["tests.gpu.measure_cache", bench.work / name, path, *words], bound)
    if not path.exists():
        return []
    value = json.loads(path.read_bytes())
    shutil.copyfile(path, bench.out / path.name)
    kinds = sorted({row["kind"] for row in value["rows"]})
    bench.note(label, {kind: numbers(value["rows"], kind) for kind in kinds})
    rows: list[dict[str, Any]] = value["rows"]
    return rows


def sharing(bench: Bench, version: str, bound: float = 60) -> None:
    """The contract between two ranks on one GPU: refused unless asked for, kept, and noticed when broken."""
    plan = write(small(version, 2, (1, 16)), bench.work / "shared.plan.json")
    bench.step("2 ranks, sharing not asked for", ["pipeline.tune", plan, bench.work / "refused"], bound)
    tune(bench, plan, "shared", "--share-gpu", "--timeout", 60, bound=bound)
    bench.step("replay shared", ["pipeline.tune.replay", "--root", bench.work / "shared"], bound)
    bench.step("2 ranks, other buckets on one", ["pipeline.tune", plan, bench.work / "broken", "--share-gpu", "--timeout", 20], bound,
               first=str(FAULTS), PIPELINE_TEST_FAULT="other_buckets", PIPELINE_TEST_RANK="1")  # fmt: skip


def smoke(bench: Bench, version: str) -> None:
    """Small shapes: does everything run?"""
    plan = write(small(version, 1, (1, 16, 128)), bench.work / "small.plan.json")
    tune(bench, plan, "small", bound=140)
    bench.step("replay small", ["pipeline.tune.replay", "--root", bench.work / "small"], 40)
    measure(bench, "small", "small-tuned-counts", bound=30)
    sharing(bench, version, bound=40)


def whole(bench: Bench, version: str) -> None:
    """The 8B shapes in bf16 and fp8: three judged tunes, one unjudged, and what fresh processes measure."""
    plan = write(both(read_plan("llama-3.1-8b", version)), bench.work / "8b.plan.json")
    for name, words in (("on-1", ()), ("on-2", ()), ("off", ("--compare", "off"))):
        tune(bench, plan, name, *words)
    measure(bench, "on-1", "on-1-tuned-counts")
    measure(bench, "on-1", "on-1-untuned-counts", "--untuned")
    measure(bench, "off", "off-tuned-counts")
    measure(bench, "off", "off-untuned-counts", "--untuned")
    tune(bench, plan, "on-3")
    names = [name for name in ("on-1", "on-2", "on-3") if (bench.out / f"{name}.json").exists()]
    compare(bench, names)
    bench.step("replay on-1", ["pipeline.tune.replay", "--root", bench.work / "on-1"], 60)
    sharing(bench, version)


def compare(bench: Bench, names: Sequence[str]) -> None:
    """Where tunes of one plan differ, time the choices of one against those of the other."""
    names = [name for name in names if (bench.out / f"{name}.json").exists()]
    for one, other in ((a, b) for i, a in enumerate(names) for b in names[i + 1 :]):
        bench.note(f"{one} and {other}", differing(bench.out / f"{one}.json", bench.out / f"{other}.json"))
        measure(bench, one, f"{one}-against-{other}", "--against", bench.work / other, bound=40)


def brief(bench: Bench, version: str) -> None:
    """The 8B shapes in bf16 and fp8: judged tunes against each other and against the default."""
    plan = write(both(read_plan("llama-3.1-8b", version)), bench.work / "8b.plan.json")
    tune(bench, plan, "on-1")
    measure(bench, "on-1", "on-1-tuned-counts")
    measure(bench, "on-1", "on-1-untuned-counts", "--untuned")
    tune(bench, plan, "on-2")
    compare(bench, ("on-1", "on-2"))
    tune(bench, plan, "on-3", bound=120)
    compare(bench, ("on-1", "on-3"))
    compare(bench, ("on-2", "on-3"))
    tune(bench, plan, "off", "--compare", "off", bound=60)
    measure(bench, "off", "off-tuned-counts")


def pair(bench: Bench, version: str) -> None:
    """The 8B shapes in bf16 and fp8, or one of them: two judged tunes, the first measured, both compared."""
    plan = write(chosen(bench, version), bench.work / "8b.plan.json")
    tune(bench, plan, "on-1")
    tune(bench, plan, "on-2")
    compare(bench, ("on-1", "on-2"))
    measure(bench, "on-1", "on-1-tuned-counts")
    measure(bench, "on-1", "on-1-untuned-counts", "--untuned")


def three(bench: Bench, version: str) -> None:
    """The 8B shapes in bf16 and fp8, or one of them: three judged tunes, each compared with the others, the first measured."""
    plan = write(chosen(bench, version), bench.work / "8b.plan.json")
    names = ("on-1", "on-2", "on-3")
    for name in names:
        tune(bench, plan, name)
    measure(bench, "on-1", "on-1-tuned-counts")
    compare(bench, names)
    measure(bench, "on-1", "on-1-untuned-counts", "--untuned")


def chosen(bench: Bench, version: str) -> Plan:
    """The 8B shapes in both kinds, or in that of `--only`."""
    planned = both(read_plan("llama-3.1-8b", version))
    return replace(planned, ops=tuple(op for op in planned.ops if bench.only in ("", op.op)))


def once(bench: Bench, version: str) -> None:
    """The 8B shapes in bf16 and fp8, or one of them: tuned once, judged, replayed and measured."""
    plan = write(chosen(bench, version), bench.work / "8b.plan.json")
    tune(bench, plan, "on-1")
    bench.step("replay on-1", ["pipeline.tune.replay", "--root", bench.work / "on-1"], 60)
    bench.step("scales of shape (1,)", ["tests.gpu.scales", bench.work / "on-1"], 40)
    measure(bench, "on-1", "on-1-tuned-counts")
    measure(bench, "on-1", "on-1-untuned-counts", "--untuned")


def octets(bench: Bench, version: str) -> None:
    """The 8B shapes in fp8, or bf16, to 256 tokens: buckets where cuBLAS's list of algorithms changes; measured between."""
    counts = tuple(sorted({1, 2, 4, *range(7, 256, 8), *range(8, 257, 8)}))
    planned = both(read_plan("llama-3.1-8b", version))
    ops = tuple(replace(op, buckets=counts) for op in planned.ops if op.op == (bench.only or "bmm_fp8"))
    plan = write(
        replace(planned, model="Llama-3.1-8B to 256 tokens", ops=ops, round_up=True),
        bench.work / "octets.plan.json",
    )
    tune(bench, plan, "octets", bound=300)
    bench.step("replay octets", ["pipeline.tune.replay", "--root", bench.work / "octets"], 60)
    measure(bench, "octets", "octets-untuned-counts", "--untuned", ",".join(map(str, BETWEEN)))
    measure(bench, "octets", "octets-tuned-counts")


def large(bench: Bench, version: str) -> None:
    """Llama-3.3-70B-FP8 on one GPU: tuned once, judged, replayed and measured."""
    plan = write(read_plan("llama-3.3-70b-fp8", version), bench.work / "70b.plan.json")
    tune(bench, plan, "70b")
    bench.step("replay 70b", ["pipeline.tune.replay", "--root", bench.work / "70b"], 60)
    bench.step("scales of shape (1,)", ["tests.gpu.scales", bench.work / "70b"], 40)
    measure(bench, "70b", "70b-tuned-counts")
    measure(bench, "70b", "70b-untuned-counts", "--untuned")


def hang(bench: Bench, version: str) -> None:
    """A tactic that does not return: while FlashInfer measures, in the rounds of judging, and in a juror."""
    for fault in ("hanging_on_a_gpu", "hanging_in_rounds_on_a_gpu", "hanging_in_workers_on_a_gpu"):
        plan = write(small(version, 1, (1, 16, 128)), bench.work / "hang.plan.json")
        shutil.rmtree(bench.work / fault, ignore_errors=True)
        bench.step(f"tune, {fault}", ["pipeline.tune", plan, bench.work / fault, "--timeout", 12, *bench.words], 120,
                   first=str(FAULTS), PIPELINE_TEST_FAULT=fault, PIPELINE_TEST_RANK="0")  # fmt: skip
        bench.keep(fault)
        bench.step(f"replay, {fault}", ["pipeline.tune.replay", "--root", bench.work / fault], 60)
        used = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader")
        bench.note(f"memory after {fault}", subprocess.run(used, capture_output=True, text=True, check=False).stdout)


MODES = {
    "smoke": smoke,
    "brief": brief,
    "pair": pair,
    "three": three,
    "hang": hang,
    "once": once,
    "octets": octets,
    "large": large,
}


def main() -> None:
    """Run all steps, or those of a mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for mode, what in MODES.items():
        parser.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=what.__doc__)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_h200"))
    parser.add_argument("--workspace", type=Path, help="where modules are compiled (default: below --work)")
    parser.add_argument("--words", default="", help="more words for every tuning, such as '--compare-budget 2'")
    parser.add_argument(
        "--only", choices=("mm_bf16", "bmm_fp8"), default="", help="of --pair, --three, --once, --octets: these alone"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    workspace = options.workspace or options.work / "workspace"
    words = tuple(options.words.split())
    bench = Bench(options.out, options.work, workspace, words, time.monotonic() + options.seconds, options.only)
    record = bench.step("record", ["pipeline.tune.record"], 60)
    version = record["record"]["flashinfer"]["flashinfer_version"] if record else "0.6.16.post3"
    MODES.get(options.mode, whole)(bench, version)


if __name__ == "__main__":
    main()
