"""What the tuner refuses before it starts anything, and what ranks refuse before anything is tuned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, error_line, write_plan

from pipeline.contract.plan import Plan

pytestmark = [pytest.mark.flashinfer, pytest.mark.once]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--timeout inf", "'inf' is not a number of seconds from 1 to 86400"),
        ("--compare-budget nan", "'nan' is not a number of seconds above 0, up to 3600"),
        ("--second-process 1", "argument --second-process: invalid choice: '1'"),
        ("--nnodes 2", "names no place"),
        ("--nnodes 2 --rdzv-endpoint host", "names no place"),
        ("--nnodes 2 --rdzv-endpoint a:99999", "--rdzv-endpoint 'a:99999' names no place"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint h:1", "--node-rank 2 of --nnodes 2"),
        ("--nnodes 0", "--nnodes 0"),
        ("--nnodes 3 --rdzv-endpoint h:1", "2 ranks cannot be shared out over 3 nodes"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, words: str, said: str
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words.split())
    assert (done.status, said in done.stderr, "tune on" in done.stderr) == (2, True, False), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}'])
def test_a_plan_that_is_none_is_refused_at_once(tuner: Tuner, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    done = tuner.run("pipeline.tune", tmp_path / "plan.json", tmp_path / "out")
    assert (done.status, "Traceback" in done.stderr, "hint:" in done.stderr) == (2, False, True)


def test_a_plan_for_elsewhere_or_for_nothing_is_refused_by_the_ranks(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    elsewhere = replace(make_plan(), arch="90a", flashinfer_version="0.1.0")
    for plan, said in (
        (elsewhere, "the plan is for FlashInfer 0.1.0"),
        (make_plan(skip_ops=("cpu_mm",)), "skip_ops (cpu_mm) leaves nothing to tune"),
    ):
        done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out")
        assert (done.status, error_line(done).startswith(f"error: {said}")) == (2, True), done.stderr
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["ranks.log"]


@pytest.mark.parametrize("stage", [(), ("--keep-failure",)])
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


def test_one_rank_that_rounds_up_is_tuned_and_replayed(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = make_plan(round_up=True)
    plan = replace(plan, layout=replace(plan.layout, tp=1))
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30)
    assert done.status == 0, done.stderr
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert (done.told["calls"], done.told["ranks"]) == (13, 1)
