"""The strategies on real ranks: what each leaves, what is refused, and resuming a run that was ended in the middle."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tune_harness import Done, Tuner, error_line, read_manifest, write_plan

from pipeline.cache.integrity import check_root
from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import OpPlan, Plan

pytestmark = pytest.mark.flashinfer

F32 = {"a": "float32", "b": "float32", "out": "float32"}


def tune(tuner: Tuner, plan: Plan, place: Path, *words: object, fault: str = "", rank: object = "*") -> Done:
    file = write_plan(plan, place / "plan.json")
    return tuner.run("pipeline.tune", file, place / "out", "--timeout", 30, *words, fault=fault, rank=rank)


def sound(tuner: Tuner, root: Path) -> Manifest:
    """A cache that the host accepts and that fresh ranks replay without a miss."""
    assert [str(finding) for finding in check_root(root)[1]] == []
    done = tuner.run("pipeline.tune.replay", "--root", root)
    assert done.status == 0, done.stderr
    assert (done.told["calls"] - done.told["hits"], done.told["measured"]) == (0, 0)
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
        assert (row.candidates >= 5, row.time_ms is not None) == (True, True), row


@pytest.mark.once
def test_the_leader_tunes_for_all(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "leader")
    assert done.status == 0, done.stderr
    manifest = sound(tuner, tmp_path / "out")
    assert manifest.strategy == "leader"
    assert set(manifest.owners.values()) == {(0,)}
    assert [rank.entries for rank in manifest.ranks] == [5, 0]


@pytest.mark.once
@pytest.mark.parametrize("fault", ["other_tactic", "steady_clock"])
def test_independent_ranks_are_used_only_where_they_agree(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str
) -> None:
    rank = 1 if fault == "other_tactic" else "*"
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "independent", fault=fault, rank=rank)
    if fault == "steady_clock":
        assert done.status == 0, done.stderr
        manifest = sound(tuner, tmp_path / "out")
        assert (manifest.strategy, manifest.owners) == ("independent", {})
        assert [one.entries for one in manifest.ranks] == [5, 5]
    else:
        assert done.status == 6
        assert error_line(done).startswith("error: rank 1 chose another tactic than rank 0 for ('cpu_mm', ")
        assert "--strategy synchronized" in done.stderr
        assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "ranks.log"]


@pytest.mark.once
def test_without_a_process_group_the_ranks_share_the_work(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = tune(tuner, make_plan(), tmp_path, "--strategy", "synchronized", fault="no_process_group")
    assert done.status == 2
    assert "lacks set_autotune_process_group, so ranks cannot average their times" in error_line(done)
    done = tune(tuner, make_plan(), tmp_path, fault="no_process_group")
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert manifest.strategy == "sharded"
    assert "lacks set_autotune_process_group" in manifest.strategy_reason


@pytest.mark.parametrize("strategy", ["synchronized", pytest.param("sharded", marks=pytest.mark.once)])
def test_a_run_that_was_ended_is_resumed_and_only_the_rest_is_tuned(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, strategy: str
) -> None:
    """The second op hangs on one rank, and the run is ended there."""
    plan = make_plan()
    plan = make_plan(ops=(*plan.ops, OpPlan("third", "cpu_mm", {"n": 128, "k": 32}, F32, (1, 16))))
    file, state = write_plan(plan, tmp_path / "plan.json"), tmp_path / "state"
    words = [tuner.python, "-m", "pipeline.tune", str(file), str(tmp_path / "out"), "--timeout", "60", "--compare", "off",
             "--state", str(state), "--strategy", strategy]  # fmt: skip
    environment = tuner.environment("stuck_in_narrow", 0, warm=True)
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "/3 tuning narrow" in line:
                break
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(120) == 130
    assert "interrupted; nothing was saved; --state" in said
    assert list((tmp_path / "out").iterdir()) == []
    kept = len(list(state.glob("*.json")))
    assert kept >= 1  # sharded: by each rank what it had finished
    shutil.copytree(state, tmp_path / "copy")
    done = tune(tuner, plan, tmp_path, "--state", state, "--strategy", strategy)
    assert done.status == 0, done.stderr
    manifest = sound(tuner, tmp_path / "out")
    resumed = [(row.op, row.bucket) for row in manifest.covered if row.note == "resumed from an interrupted run"]
    again = [(row.op, row.bucket) for row in manifest.covered if not row.note]
    assert len(resumed) + len(again) == len(manifest.covered) == 7
    assert resumed and any(op == "narrow" for op, _ in again)
    assert any(note.startswith(f"resumed {len(resumed)} buckets of ") for note in manifest.notes)
    assert list(state.iterdir()) == []  # what ended well is a cache, and no leftover of a run
    if strategy == "synchronized":
        assert (kept, {op for op, _ in resumed}, "tuning wide" in done.stderr) == (1, {"wide"}, False)
        (damaged,) = (tmp_path / "copy").glob("*.json")
        damaged.write_bytes(damaged.read_bytes()[:-9])
        done = tune(tuner, plan, tmp_path, "--state", tmp_path / "copy")
        assert done.status == 0, done.stderr
        manifest = read_manifest(tmp_path / "out")
        assert [row.note for row in manifest.covered] == [""] * 7
        assert any(note.startswith(f"{damaged.name} of an interrupted run was not used: ") for note in manifest.notes)
