"""The tuner's own commands on a host, whose Python has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planning_samples import plan_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", ["pipeline.tune", "pipeline.tune.explain"])
def test_without_torch_one_line_says_what_to_type(tmp_path: Path, command: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_of("tiny", arch="cpu-x86_64", tp=2).to_json()))
    words = [plan, tmp_path / "out"] if command == "pipeline.tune" else [tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", command, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    instead = {"pipeline.tune": "pipeline tune MODEL", "pipeline.tune.explain": "pipeline explain FILE|DIR|IMAGE"}
    assert done.returncode == 2, done.stderr
    assert f"error: {sys.executable} has no torch" in done.stderr and f"`{instead[command]}`" in done.stderr
    assert "Traceback" not in done.stderr and "tune on" not in done.stderr
