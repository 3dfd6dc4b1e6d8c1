"""Two GPUs: every strategy with its replay on both ranks, and ranks that are killed or stopped while they tune.

    python -m tests.gpu.two_gpus OUT [--model MODEL] [--turns N]

Needs torch, FlashInfer and the host's requirements importable. OUT/two_gpus.json is written after each step. Modules
are compiled before anything counts; the tunes of the strategies alternate, `--turns` of each.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ("synchronized", "sharded", "leader", "independent")


class Bench:
    """One folder of results, and how processes are started."""

    def __init__(self, out: Path, work: Path = Path("/tmp/two_gpus")) -> None:
        self.out, self.work = out, work
        self.found: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        more = {"PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": str(work / "workspace"), "GLOO_SOCKET_IFNAME": "lo"}
        self.env = {**os.environ, **more}

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        (self.out / "two_gpus.json").write_text(json.dumps(self.found, indent=1))
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {json.dumps(value)[:500]}", flush=True)

    def run(self, name: str, *words: str, timeout: float = 300) -> dict[str, Any]:
        """Run one module; note its exit code, seconds, JSON and the end of what it said, and return the JSON."""
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.put(name, {"status": "timeout", "seconds": timeout})
            return {}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        seconds = round(time.monotonic() - began, 2)
        self.put(name, {"status": done.returncode, "seconds": seconds, "told": told, "said": done.stderr[-2500:]})
        return told

    def fresh(self, name: str) -> Path:
        """A folder to tune into; what an earlier run left would be taken for this one's."""
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name


def strategies(bench: Bench, plan: Path, turns: int) -> None:
    """Tunes of each strategy in turn, not compared with the default, each replayed; then two that compare."""
    bench.run("compile modules", "pipeline.tune", str(plan), str(bench.fresh("warm")), "--compare", "off")
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for turn in range(turns):
        for name in STRATEGIES:
            root = bench.fresh(name)
            words = ("pipeline.tune", str(plan), str(root), "--strategy", name, "--compare", "off")
            if told := bench.run(f"{name}, turn {turn}", *words):
                seconds[name].append(told["seconds"])
                bench.run(f"replay {name}, turn {turn}", "pipeline.tune.replay", "--root", str(root))
    ends = {name: [min(own), statistics.median(own), max(own)] for name, own in seconds.items() if own}
    bench.put("seconds inside the tuner: least, median, most", ends)
    for name in STRATEGIES[:2]:
        bench.run(f"{name}, compared", "pipeline.tune", str(plan), str(bench.fresh("on")), "--strategy", name)
        bench.run(f"replay {name}, compared", "pipeline.tune.replay", "--root", str(bench.work / "on"))


def broken(bench: Bench, name: str, plan: Path, sign: signal.Signals) -> None:
    """Start a tune, send rank 1 a signal while it measures, and see how it ends."""
    root = bench.fresh(name)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.tune", str(plan), str(root), "--timeout", "20"],
        cwd=ROOT, env=bench.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said, sent = [], 0.0
    for line in process.stderr:
        said.append(line)
        if not sent and "tuning" in line and (pid := rank_of(process.pid, 1)) is not None:
            os.kill(pid, sign)
            sent = time.monotonic()
    status, ended = process.wait(), time.monotonic()
    bench.put(name, {
        "status": status, "seconds": round(ended - began, 2),
        "after signal": round(ended - sent, 2) if sent else "none was sent",
        "names rank 1": any(line.startswith("error: rank 1 ") for line in said),
        "saved": any(root.glob("*/*/*")), "said": "".join(said)[-500:],
    })  # fmt: skip


def rank_of(supervisor: int, number: int) -> int | None:
    """The process of a rank that a supervisor has started; other tunes of this machine are left alone."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            ours = parent == str(supervisor) and b"pipeline.tune.worker\0" in (place / "cmdline").read_bytes()
            if ours and f"\0LOCAL_RANK={number}\0".encode() in b"\0" + (place / "environ").read_bytes():
                return int(place.name)
        except OSError:  # it ended
            continue
    return None


def main() -> None:
    """All steps in order."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.two_gpus")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="tunes of each strategy")
    options = parser.parse_args()
    bench = Bench(options.out)
    plan = options.out / "plan.json"
    bench.run("plan", "pipeline", "plan", options.model, "--tp", "2", "--arch", "90a", "--output", str(plan))
    strategies(bench, plan, options.turns)
    broken(bench, "killed", plan, signal.SIGKILL)
    broken(bench, "stopped", plan, signal.SIGSTOP)


if __name__ == "__main__":
    main()
