"""The strategies on real ranks: what each leaves, what is refused, and what decides where none is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Done, Tuner, error_line, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import Layout, Plan

pytestmark = pytest.mark.flashinfer


def tune(tuner: Tuner, plan: Plan, place: Path, *words: object, fault: str = "", rank: object = "*") -> Done:
    file = write_plan(plan, place / "plan.json")
    return tuner.run("pipeline.tune", file, place / "out", "--timeout", 30, *words, fault=fault, rank=rank)


def sound(tuner: Tuner, root: Path) -> Manifest:
    """A cache that the host accepts and that fresh ranks replay without a miss."""
    assert [str(finding) for finding in check_root(root)[1]] == []
    done = tuner.run("pipeline.tune.replay", "--root", root)
    assert done.status == 0, done.stderr
    assert (done.told["calls"], done.told["hits"], done.told["measured"]) == (26, 26, 0)
    return read_manifest(root)


def test_sharded_deals_every_bucket_to_one_rank(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "sharded")
    assert done.status == 0, done.stderr
    manifest = sound(tuner, tmp_path / "out")
    assert manifest.strategy == "sharded"
    assert manifest.strategy_reason.startswith("asked for: ")
    assert set(manifest.owners) == {row.entry for row in manifest.covered}
    assert sorted(set(manifest.owners.values())) == [(0,), (1,)]
    assert sum(rank.entries for rank in manifest.ranks) == 5
    for row in manifest.covered:
        assert row.candidates >= 5, row
        assert row.time_ms is not None, row


def test_the_leader_tunes_for_all(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "leader")
    assert done.status == 0, done.stderr
    manifest = sound(tuner, tmp_path / "out")
    assert manifest.strategy == "leader"
    assert set(manifest.owners.values()) == {(0,)}
    assert [rank.entries for rank in manifest.ranks] == [5, 0]


def test_independent_ranks_that_differ_are_refused(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "independent", fault="other_tactic", rank=1)
    assert done.status == 6
    assert error_line(done).startswith("error: rank 1 chose another tactic than rank 0 for ('cpu_mm', ")
    assert "--strategy synchronized" in done.stderr
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "ranks.log"]


@pytest.mark.once
def test_independent_ranks_that_agree_are_taken(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "independent", fault="steady_clock")
    assert done.status == 0, done.stderr
    manifest = sound(tuner, tmp_path / "out")
    assert (manifest.strategy, manifest.owners) == ("independent", {})
    assert [rank.entries for rank in manifest.ranks] == [5, 5]


@pytest.mark.once
def test_leader_is_refused_under_expert_parallelism(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = tune(tuner, make_plan(layout=Layout(tp=2, ep=2)), tmp_path, "--strategy", "leader")
    assert done.status == 2
    assert error_line(done).startswith("error: --strategy leader with EP=2: in an all-to-all")
    assert not list((tmp_path / "out").glob("*/*/*"))


@pytest.mark.once
def test_without_a_process_group_the_ranks_share_the_work(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = tune(tuner, make_plan(), tmp_path, fault="no_process_group")
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert manifest.strategy == "sharded"
    assert "lacks set_autotune_process_group" in manifest.strategy_reason
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "synchronized", fault="no_process_group")
    assert done.status == 2
    assert "lacks set_autotune_process_group, so ranks cannot average their times" in error_line(done)


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("flashinfer_0_6_15", ["FlashInfer 0.6.15.post1 is refused: it has no process group"]),
        ("flashinfer_0_6_12", ["FlashInfer 0.6.12 is refused: it has no process group", "keys collide"]),
    ],
)
def test_an_old_flashinfer_is_refused(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, reasons: list[str]
) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "independent", fault=fault)
    assert done.status == 2
    assert all(reason in error_line(done) for reason in reasons)


def test_the_default_is_synchronized(tuned: tuple[Path, Any]) -> None:
    root, told = tuned
    manifest = read_manifest(root)
    assert told["strategy"] == manifest.strategy == "synchronized"
    assert "has set_autotune_process_group" in manifest.strategy_reason
    assert json.loads(json.dumps(manifest.to_json()))["strategy_reason"] == manifest.strategy_reason
