"""What the tuner is told on its command line, and refuses before it starts anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, error_line, write_plan

from pipeline.contract.plan import Plan

pytestmark = [pytest.mark.flashinfer, pytest.mark.once]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--timeout", "inf"), "'inf' is not a number of seconds from 1 to 86400"),
        (("--compare-budget", "nan"), "'nan' is not a number of seconds above 0, up to 3600"),
        (("--nproc", "5000"), "'5000' is not a number of ranks from 1 to 1024"),
        (("--nnodes", "2", "--rdzv-endpoint", "a:99999"), "error: --rdzv-endpoint 'a:99999' names no place"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = tuner.run("pipeline.tune", write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out", *words)
    assert (done.status, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


@pytest.mark.parametrize("stage", [(), ("--stage",)])
def test_a_result_that_cannot_be_written_is_refused_before_anything_runs(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, stage: tuple[str, ...]
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    for place, why in ((file, "File exists"), (file / "below", "Not a directory"), (Path("/proc/x"), "No such file")):
        done = tuner.run("pipeline.tune", file, place, *stage)
        assert done.status == 2
        assert error_line(done).startswith(f"error: {place} cannot be written to: {why}")
        assert "tune on" not in done.stderr


def test_a_replay_whose_file_cannot_be_written_prints_its_result(tuner: Tuner, tuned: tuple[Path, Any]) -> None:
    done = tuner.run("pipeline.tune.replay", "--root", tuned[0], "--out", "/proc/x/y")
    assert (done.status, error_line(done)) == (2, "error: --out /proc/x/y: No such file or directory")
    assert done.told["calls"] == done.told["hits"] > 0
