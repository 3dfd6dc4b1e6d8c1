"""Four and eight ranks: the same code, the same contract, every rank named by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tune_harness import Tuner, error_line, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.contract.plan import Layout, Plan

pytestmark = pytest.mark.flashinfer


@pytest.mark.once
def test_eight_ranks_share_the_work_and_replay_it(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan(layout=Layout(tp=8))
    plan = replace(plan, ops=tuple(replace(op, buckets=(1, 2, 4, 8)) for op in plan.ops))
    file = write_plan(plan, tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--strategy", "sharded", "--timeout", 60)
    assert done.status == 0, done.stderr
    assert [str(finding) for finding in check_root(tmp_path / "out")[1]] == []
    manifest = read_manifest(tmp_path / "out")
    assert [rank.rank for rank in manifest.ranks] == list(range(8))
    assert sorted(manifest.owners.values()) == [(rank,) for rank in range(8)]
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert done.told["ranks"] == 8
    assert done.told["hits"] == done.told["calls"] > 0


@pytest.mark.once
def test_of_four_ranks_the_one_that_differs_is_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    file = write_plan(make_plan(layout=Layout(tp=2, ep=2, dp=2)), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", fault="tactic_missing", rank=3)
    assert done.status == 6
    assert error_line(done) == "error: rank 3 differs from the others in tactic lists before wide"
    assert not list((tmp_path / "out").glob("*/*/*"))
