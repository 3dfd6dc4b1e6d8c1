"""Two GPUs: strategies, broken ranks, replay on both ranks, and a small tensor-parallel block served from a cache.

    python -m tests.gpu.two_gpus OUT [STEP…]

Needs torch, FlashInfer and the host's requirements importable. Everything that is found is written to OUT as it is
found. The steps, in their order (default all): `strategies` and `broken` for Llama-3.1-8B, `block`, `groups`, `large` for
Llama-3.3-70B-FP8, and `spread`: three tunes of each strategy in turn, for both models, modules compiled before. `block`
takes the cache that an earlier `strategies` left in /tmp/two_gpus.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.otherkeys import other_keys

from .bench_h200 import geometric
from .e2e import HERE, LOOPBACK

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ("synchronized", "sharded", "leader", "independent")
STEPS = ("strategies", "broken", "block", "groups", "large", "spread")
AGREE, TURNS = STRATEGIES[:3], 3


class Bench:
    """One folder of results, and how processes are started."""

    def __init__(self, out: Path, work: Path = Path("/tmp/two_gpus")) -> None:
        self.out, self.work = out, work
        self.found: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        # torchrun puts a script's own folder on the path, not the folder that it was started in
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.env = {
            **os.environ,
            **LOOPBACK,
            "PYTHONPATH": path,
            "FLASHINFER_WORKSPACE_BASE": str(self.work / "workspace"),
        }

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        (self.out / "two_gpus.json").write_text(json.dumps(self.found, indent=1))
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {json.dumps(value)[:500]}", flush=True)

    def run(self, name: str, *words: str, bound: float = 150) -> dict[str, Any]:
        """Run one of our modules; keep its status, seconds, JSON, and the end of what it said."""
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env=self.env,
                capture_output=True,
                text=True,
                timeout=bound,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            told = {
                "status": done.returncode,
                "told": json.loads(lines[-1]) if lines else None,
                "said": done.stderr[-2500:],
            }
        except subprocess.TimeoutExpired:
            told = {"status": "timeout"}
        told["seconds"] = round(time.monotonic() - began, 2)
        self.put(name, told)
        return told


def memory() -> list[int]:
    """MiB in use on each GPU."""
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in said.stdout.split()]


def rank_of(root: Path, number: int) -> int | None:
    """The process of a rank that tunes into `root`; other tunes of this machine are none of ours."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
            ours = b"pipeline.tune.worker\0" in words and str(root).encode() in words
            if ours and f"\0LOCAL_RANK={number}\0".encode() in b"\0" + (place / "environ").read_bytes():
                return int(place.name)
        except OSError:  # it ended
            continue
    return None


def broken(bench: Bench, name: str, plan: Path, sign: signal.Signals) -> None:
    """Start a tune, send rank 1 a signal while it measures, and see how it ends."""
    shutil.rmtree(bench.work / name, ignore_errors=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.tune", str(plan), str(bench.work / name), "--timeout", "20"],
        cwd=ROOT, env=bench.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said, sent = [], 0.0
    for line in process.stderr:
        said.append(line)
        if not sent and "tuning" in line and (pid := rank_of(bench.work / name, 1)) is not None:
            os.kill(pid, sign)
            sent = time.monotonic()
    status = process.wait()
    ended = time.monotonic()
    time.sleep(1)  # until the driver has taken the memory back
    bench.put(name, {
        "status": status, "seconds": round(ended - began, 2),
        "after signal": round(ended - sent, 2) if sent else "none was sent",
        "names rank 1": any(line.startswith("error: rank 1 ") for line in said),
        "saved": any((bench.work / name).glob("*/*/*")), "memory after": memory(), "said": "".join(said)[-500:],
    })  # fmt: skip


def entries(root: Path) -> dict[str, Any]:
    """The entries of the one cache below a root, each once: not those that stand under another caller's key as well."""
    path = next(root.glob("*/*/*/autotune_configs.json"))
    held = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("_")}
    twice = {other for key in held for other in other_keys(key)}
    return {k: v for k, v in held.items() if k not in twice}


def alike(bench: Bench, one: str, other: str) -> None:
    """Where two tunes chose differently, their choices timed side by side in a fresh process: above 1, `other` is slower."""
    path = bench.work / f"{one}-against-{other}.json"
    path.unlink(missing_ok=True)
    words = (str(bench.work / one), str(path), "--against", str(bench.work / other))
    bench.run(f"{one} against {other}", "tests.gpu.measure_cache", *words)
    if not path.exists():
        return
    rows = [row for row in json.loads(path.read_text())["rows"] if "ratio" in row]
    gains = sorted((1 / row["ratio"], f"{row['op']} at {row['tokens']}") for row in rows)
    bench.put(f"{other} over {one}, where they differ", {
        "entries": len(gains), "geometric mean": round(geometric([gain for gain, _ in gains]), 5), "ends": [gains[0], gains[-1]] if gains else [],
    })  # fmt: skip


def strategies(bench: Bench, plan: Path) -> None:
    """Every strategy without judging, two with; fresh processes replay each on both ranks."""
    shutil.rmtree(bench.work / "warm", ignore_errors=True)
    bench.run("warm up (JIT)", "pipeline.tune", str(plan), str(bench.work / "warm"), "--compare", "off")
    for judge in ("off", "on"):
        for strategy in STRATEGIES if judge == "off" else ("synchronized", "sharded"):
            one(bench, plan, strategy, judge)
    places = [bench.work / "warm", *(bench.work / f"{name}-{judge}" for name in STRATEGIES for judge in ("off", "on"))]
    done = {p.name: entries(p) for p in places if any(p.glob("*/*/*/autotune_configs.json"))}
    base = done.get("synchronized-off", {})
    bench.put("entries that differ from synchronized-off", {
        name: [sum(base[k] != found.get(k) for k in base), len(base)] for name, found in done.items()
    })  # fmt: skip
    alike(bench, "synchronized-on", "sharded-on")


def one(bench: Bench, plan: Path, strategy: str, judge: str, prefix: str = "", bound: float = 150) -> None:
    """One tune and its replay."""
    name = f"{prefix}{strategy}, judge {judge}"
    root = bench.work / f"{prefix.strip()}{strategy}-{judge}"
    shutil.rmtree(root, ignore_errors=True)  # what an earlier run left would be taken for this one's
    bench.run(name, "pipeline.tune", str(plan), str(root), "--strategy", strategy, "--compare", judge, bound=bound)
    if any(root.glob("*/*/*")):
        bench.run(f"replay {name}", "pipeline.tune.replay", "--root", str(root))


def spread(bench: Bench, plan: Path, model: str) -> None:
    """Seconds of each strategy that agrees by itself, not judged: least, median and most of some tunes in turn."""
    inside: dict[str, list[float]] = {strategy: [] for strategy in AGREE}
    measuring: dict[str, list[float]] = {strategy: [] for strategy in AGREE}
    for turn in range(TURNS):
        for strategy in AGREE:
            root = bench.work / "spread"
            shutil.rmtree(root, ignore_errors=True)
            words = ("pipeline.tune", str(plan), str(root), "--strategy", strategy, "--compare", "off")
            told = bench.run(f"{model} {strategy}, turn {turn}", *words).get("told")
            if told:
                inside[strategy].append(told["seconds"])
                measuring[strategy].append(told["phases"]["measuring"])
    bench.put(f"{model}, spread", {"inside": _ends(inside), "measuring": _ends(measuring)})


def _ends(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [min(own), statistics.median(own), max(own)] for name, own in seconds.items() if own}


def main(out: Path, steps: Sequence[str]) -> None:
    """The chosen steps."""
    bench = Bench(out)
    plans = []
    for model in ("Llama-3.1-8B", "Llama-3.3-70B-FP8"):
        plans.append(bench.out / f"{model}.json")
        bench.run(f"plan {model}", "pipeline", "plan", model, "--tp", "2", "--arch", "90a", "--output", str(plans[-1]))
    torchrun = ("torch.distributed.run", *HERE, "--nproc-per-node=2")
    chosen = steps or STEPS
    if "strategies" in chosen:
        strategies(bench, plans[0])
    if "broken" in chosen:
        broken(bench, "killed", plans[0], signal.SIGKILL)
        broken(bench, "stopped", plans[0], signal.SIGSTOP)
    if "block" in chosen:
        block, root = Path(__file__).with_name("tp_block.py"), bench.work / "synchronized-off"
        if not root.exists():
            one(bench, plans[0], "synchronized", "off")
        for mode in ("tuned", "default", "tune", "tuned"):
            bench.run(f"block, {mode}", *torchrun, str(block), mode, str(root), bound=60)
    if "groups" in chosen:
        groups = Path(__file__).with_name("side_by_side.py")
        bench.run("NCCL and gloo side by side", *torchrun, str(groups), bound=60)
    if "large" in chosen:
        for strategy in STRATEGIES:
            one(bench, plans[1], strategy, "off", "70B ")
        one(bench, plans[1], "synchronized", "on", "70B ", 200)
        one(bench, plans[1], "sharded", "on", "70B ", 150)
        alike(bench, "70Bsynchronized-on", "70Bsharded-on")
    if "spread" in chosen:
        spread(bench, plans[0], "8B")
        spread(bench, plans[1], "70B")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.two_gpus")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("steps", nargs="*", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    options = parser.parse_args()
    main(options.out, options.steps)
