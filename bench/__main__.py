"""`python -m bench [NAME…]`: run every benchmark, or those that are named."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import tune
from bench.measure import many, say

PIPELINE = (sys.executable, "-m", "pipeline")
ENTRY = Path(__file__).resolve().parents[1] / "pipeline" / "start" / "pipeline-run"


def commands() -> None:
    """Commands that need no Docker Engine, cold: `versions check`, `plan`, and the entry point of an image."""
    say("python -IS -c pass", many([sys.executable, "-IS", "-c", "pass"], runs=15))
    say("pipeline versions check", many([*PIPELINE, "versions", "check"], runs=15))
    say("pipeline plan tiny", many([*PIPELINE, "plan", "tiny"]))
    say("pipeline-run true, no cache baked", many([sys.executable, "-IS", str(ENTRY), "true"], runs=15))


BENCHMARKS = {"check": commands, "tune": tune.main}

parser = argparse.ArgumentParser(prog="python -m bench", description="Figures of speed and memory.")
parser.add_argument("names", nargs="*", choices=BENCHMARKS, metavar="NAME", help="check, tune (default: all)")
for name in parser.parse_args().names or BENCHMARKS:
    print(f"== {name}", flush=True)
    BENCHMARKS[name]()
