"""Commands that need no engine, cold: `versions check`, `plan`, and the entry point of an image."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.measure import many, say

PIPELINE = (sys.executable, "-m", "pipeline")
ENTRY = Path(__file__).resolve().parents[1] / "pipeline" / "start" / "pipeline-run"


def main() -> None:
    """Measure."""
    say("python -IS -c pass", many([sys.executable, "-IS", "-c", "pass"], runs=15))
    say("pipeline versions check", many([*PIPELINE, "versions", "check"], runs=15))
    say("pipeline plan tiny", many([*PIPELINE, "plan", "tiny"]))
    say("pipeline plan DeepSeek-V3 --tp 8", many([*PIPELINE, "plan", "DeepSeek-V3", "--tp", "8", "--arch", "90a"]))
    say("pipeline-run true, no cache baked", many([sys.executable, "-IS", str(ENTRY), "true"], runs=15))
