"""Comparing and verifying in real ranks: the default is an entry like any other, a wrong tactic is replaced and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, error_line, write_plan

from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import Layout, OpPlan, Plan

pytestmark = pytest.mark.flashinfer

BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
ON = ("--compare", "on", "--compare-budget", "60")  # enough for a busy machine
Place = tuple[Manifest, dict[str, Any]]


@pytest.fixture
def plan(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    whole = make_plan()
    return write_plan(replace(whole, ops=(replace(whole.ops[1], buckets=(1, 16)),)), tmp_path / "plan.json")


def read(root: Path) -> Place:
    (place,) = root.glob("*/*/*")
    manifest = Manifest.from_json(json.loads((place / "manifest.json").read_text()))
    return manifest, json.loads((place / "autotune_configs.json").read_text())


def test_a_default_that_wins_is_an_entry_that_hits(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="default_wins", rank="*")
    assert done.status == 0, done.stderr
    manifest, file = read(tmp_path / "out")
    assert [(row.tactic, row.decided_by, row.ratio) for row in manifest.covered] == [(-1, "default", 1.0)] * 2
    assert [file[row.entry][:2] for row in manifest.covered] == [["CpuWholeRunner", -1]] * 2
    replayed = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert replayed.status == 0, replayed.stderr
    assert replayed.told["hits"] == replayed.told["calls"] > 0


@pytest.mark.once
@pytest.mark.parametrize("fault", ["as_on_a_gpu", "no_memory_together"])
def test_the_way_of_a_gpu_with_its_second_process(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str
) -> None:
    """Graphs, both states of the clock, several buckets in one go; alone, those for which there is no memory."""
    op = replace(make_plan().ops[0], shape={"n": 768, "k": 352}, buckets=(1, 128, 256))  # a weight that is copied
    file = write_plan(make_plan(ops=(op,)), tmp_path / "plan.json")
    done = tuner.run(
        "pipeline.tune", file, tmp_path / "out", *ON, "--second-process", "on", fault=fault, rank="*", warm=False
    )
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    for row in manifest.covered:
        assert row.decided_by in ("default", "faster", "tie")
        assert row.default_ms and row.default_ms > 0 and not row.note, row
        assert row.ratio is not None and row.ratio <= 1.0 and (row.tactic == -1) == (row.ratio == 1.0), row
    assert not manifest.notes
    assert manifest.options["workers"] == 1
    assert "at 128, 256 tokens" in done.stderr
    assert ("at 128 tokens" in done.stderr) == (fault == "no_memory_together")


@pytest.mark.once
def test_what_no_time_was_left_for_keeps_the_default_and_is_said(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", "--compare", "on", "--compare-budget", "0.0001")
    assert done.status == 0, done.stderr
    assert "comparing takes 0 s at most" in done.stderr
    manifest, _ = read(tmp_path / "out")
    last = manifest.covered[-1]  # the first bucket may begin before anything is spent
    assert (last.tactic, last.decided_by, last.note) == (
        -1,
        "default",
        "the default: the time for comparing was used up",
    )
    assert any("keep the default: comparing had a limit of 0.0 s" in note for note in manifest.notes)


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("worker_dies", "BrokenProcessPool"),
        ("worker_hangs", "no answer within 3 s"),
    ],
)
def test_a_second_process_that_is_lost_leaves_the_default(
    tuner: Tuner, plan: Path, tmp_path: Path, fault: str, why: str
) -> None:
    words = (*ON, "--second-process", "on", "--timeout", "6")
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *words, fault=fault, warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    (note,) = (note for note in manifest.notes if "process" in note)
    assert note.startswith("compared without the second process: on rank 1")
    assert why in note
    assert {(row.tactic, row.decided_by) for row in manifest.covered} == {(-1, "default")}
    assert tuner.run("pipeline.tune.replay", "--root", tmp_path / "out").status == 0


@pytest.mark.once
@pytest.mark.parametrize("fault", ["worker_cannot_run_a_candidate", "worker_lacks_memory"])
def test_what_a_second_process_cannot_time_is_not_chosen(tuner: Tuner, plan: Path, tmp_path: Path, fault: str) -> None:
    """For want of memory it times nothing; the rank goes on, and the rows say why they keep the default."""
    done = tuner.run(
        "pipeline.tune", plan, tmp_path / "out", *ON, "--second-process", "on", fault=fault, rank="*", warm=False
    )
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert not manifest.notes
    rows = [row for row in manifest.covered if row.bucket == 16 or fault == "worker_lacks_memory"]
    assert {(row.tactic, row.decided_by) for row in rows} == {(-1, "default")}
    said = "the default: the second process could not time it: OutOfMemoryError: planted exhaustion"
    assert {row.note for row in rows} == ({said} if fault == "worker_lacks_memory" else {""})


@pytest.fixture
def moe(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    """A MoE layer on one rank, for a stand-in of the runner that its two products share."""
    shape = {"experts": 8, "local_experts": 8, "hidden": 128, "intermediate": 128, "top_k": 2, "tp": 1, "ep": 1}
    op = OpPlan("moe", "cutlass_fused_moe", shape, BF16, (4,))
    return write_plan(make_plan(ops=(op,), layout=Layout()), tmp_path / "moe.json")


def chosen(manifest: Manifest) -> dict[str, tuple[Any, str]]:
    return {row.entry.split("'")[1].rpartition(":")[2]: (row.tactic, row.decided_by) for row in manifest.covered}


def test_the_two_products_of_a_moe_layer_are_compared_each_by_its_own_tactics(
    tuner: Tuner, moe: Path, tmp_path: Path
) -> None:
    """No captured graph outlives the workspace that it reads: its candidates could not be timed."""
    done = tuner.run(
        "pipeline.tune", moe, tmp_path / "out", *ON, "--second-process", "on", fault="moe", rank="*", warm=False
    )
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert chosen(manifest) == {"gemm1": (2, "faster"), "gemm2": (5, "faster")}
    assert [(row.candidates, row.note) for row in manifest.covered] == [(3, "")] * 2
    assert tuner.run("pipeline.tune.replay", "--root", tmp_path / "out", fault="moe", rank="*").status == 0


def blocked(manifest: Manifest) -> set[tuple[str, Any]]:
    return {(one["custom_op"].rpartition(":")[2], one["tactic"]) for one in manifest.blocked}


@pytest.mark.once
def test_where_a_call_of_two_products_ends_its_rank_both_are_left_out_at_once(
    tuner: Tuner, moe: Path, tmp_path: Path
) -> None:
    """Nobody can say which of them it was."""
    done = tuner.run("pipeline.tune", moe, tmp_path / "out", *ON, fault="moe_crashes", rank="*")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert blocked(manifest) == {("gemm1", 2), ("gemm2", 5)}
    assert "(1 of 5 times at most)" in done.stderr and "(2 of 5" not in done.stderr


def test_a_wrong_first_product_of_a_moe_layer_blocks_no_tactic_of_the_second(
    tuner: Tuner, moe: Path, tmp_path: Path
) -> None:
    """Both are looked up before either runs. Memory that runs out in the reference blocks nothing either."""
    done = tuner.run("pipeline.tune", moe, tmp_path / "out", *ON, fault="moe_wrong", rank="*")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert blocked(manifest) == {("gemm1", 2)}
    assert chosen(manifest)["gemm2"] == (5, "faster")
    assert chosen(manifest)["gemm1"][0] != 2
    assert [row.candidates for row in manifest.covered] == [3, 3], "each once, though some were timed again"
    said = "rows were compared, for want of memory for the reference"
    assert list(manifest.notes) == [f"moe at {tokens} tokens: 32 {said}" for tokens in (4, 5)]


def test_memory_that_the_default_lacks_too_blocks_no_tactic(tuner: Tuner, moe: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", moe, tmp_path / "out", *ON, fault="moe_lacks_memory", rank="*")
    assert done.status == 6
    assert error_line(done) == "error: out of memory while running moe at 5 tokens, with the default too"


def test_a_wrong_tactic_is_blocked_and_the_bucket_tuned_again(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="wrong_and_fast", rank="*")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert {(one["op"], one["bucket"], one["runner"], one["tactic"][0]) for one in manifest.blocked} == {
        ("narrow", 1, "CpuWholeRunner", "upcast"),
        ("narrow", 16, "CpuWholeRunner", "upcast"),
    }
    assert all("times the bound" in one["reason"] for one in manifest.blocked)
    assert len(manifest.covered) == 2
    assert not [row for row in manifest.covered if row.tactic != -1 and row.tactic[0] == "upcast"]
    assert tuner.run("pipeline.tune.replay", "--root", tmp_path / "out").status == 0


@pytest.mark.once
def test_a_rank_that_cannot_compare_leaves_the_argmin_on_all(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="no_memory_to_compare", rank=1)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert {row.decided_by for row in manifest.covered} == {"argmin"}
    assert all("not compared: MemoryError" in row.note for row in manifest.covered)
