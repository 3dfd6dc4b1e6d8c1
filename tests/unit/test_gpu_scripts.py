"""The scripts that measure on GPUs, as far as no GPU is needed: their words, and the arithmetic behind the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import bench_h200, cublas_lists, two_gpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("*.py"))


def ran(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [sys.executable, "-m", name, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_a_script_takes_and_measures_nothing(name: str) -> None:
    done = ran(f"tests.gpu.{name}", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert not (ROOT / "--help").exists()


@pytest.mark.parametrize(
    ("name", "words", "variables"),
    [
        ("tests.gpu.two_gpus", ["OUT", "stratgies"], {}),
        ("tests.gpu.tp_block", ["tunned"], {}),
        ("tests.gpu.first_pass", ["tunned", "plan.json"], {}),
        ("tests.gpu.side_by_side", ["glue"], {}),
        ("tests.gpu.e2e", ["base", "OUT"], {"E2E_STEPS": "stage blocks"}),
        ("bench", ["versio"], {}),
    ],
)
def test_a_word_that_is_none_is_refused(name: str, words: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    """A step that does not exist was run as nothing, and a mode that does not exist as the default."""
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    done = ran(name, *words, **variables)
    assert done.returncode == 2
    assert "usage: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def row(op: str, tokens: int, tactic: int, *ratios: float) -> dict[str, Any]:
    ratio = 1.0
    for one in ratios:
        ratio *= one ** (1 / len(ratios))
    return {
        "op": op,
        "kind": "mm_bf16",
        "tokens": tokens,
        "tactic": tactic,
        "hit": True,
        "ratio": ratio,
        "ratios": ratios,
    }


def test_a_gain_is_default_over_tuned_over_both_states() -> None:
    rows = [
        row("o", 64, -1, 1.0),
        row("o", 128, 3, 1.25, 0.5),
        row("o", 256, 2, 0.8, 0.8),
        {"kind": "mm_bf16", "failed": {}},
    ]
    found = bench_h200.numbers(rows, "mm_bf16")
    assert (found["count"], found["left_default"], found["hits"]) == (3, 2, 3)
    assert found["geometric_mean"] == pytest.approx((1 * (0.8 * 2) ** 0.5 * 1.25) ** (1 / 3), abs=1e-5)
    assert found["by_state"] == {
        "at rest": pytest.approx((1 * 0.8 * 1.25) ** (1 / 3), abs=1e-5),
        "under load": pytest.approx((2 * 1.25) ** 0.5, abs=1e-5),
    }
    assert found["worst"][0] == [0.8, "o at 128, at rest"]
    assert found["best"] == [2.0, "o at 128, under load"]
    assert found["worst_of_those"] == 0.8
    assert bench_h200.numbers(rows, "bmm_fp8") == {}


def test_hindsight_takes_one_number_for_each_gap_between_buckets() -> None:
    times = {
        2: {-1: 1.0, 0: 0.1},  # a bucket: no count between
        3: {-1: 10.0, 0: 5.0, 1: 8.0},
        5: {-1: 10.0, 0: 40.0, 1: 8.0},
        9: {-1: 10.0},  # in a gap of its own, without another number
    }
    assert cublas_lists.hindsight(times, (1, 2, 8, 16)) == pytest.approx((1.25 * 1.25 * 1) ** (1 / 3))
    assert cublas_lists.hindsight({}, (1, 2)) == 1.0


def test_two_tunes_are_compared_by_what_was_measured_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = two_gpus.Bench(tmp_path / "out", tmp_path)
    path = tmp_path / "a-against-b.json"
    rows = [{"op": "o", "tokens": 1, "ratio": 0.8}, {"op": "o", "tokens": 2, "ratio": 1.25}, {"op": "o", "tokens": 4}]
    path.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(bench, "run", lambda *words: None)
    two_gpus.alike(bench, "a", "b")
    assert bench.found == {}
    monkeypatch.setattr(bench, "run", lambda *words: path.write_text(json.dumps({"rows": rows[:1]})))
    two_gpus.alike(bench, "a", "b")
    told = {"entries": 1, "geometric mean": 1.25, "ends": [(1.25, "o at 1"), (1.25, "o at 1")]}
    assert bench.found == {"b over a, where they differ": told}
