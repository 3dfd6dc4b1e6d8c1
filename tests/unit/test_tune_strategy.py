"""Strategies, dealing, what is kept between runs, odd choices: the parts that need no torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.__main__ import main
from pipeline.contract.errors import UsageError
from pipeline.contract.manifest import Covered
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.flashinfer.leader import LeaderUnfit
from pipeline.flashinfer.ops import TUNED_AS, is_skipped
from pipeline.tune.__main__ import main as tuner
from pipeline.tune.agreement import EntryElsewhere, GpuShared, Held, RankResult, TacticsDiffer, merge, one_gpu_each
from pipeline.tune.doubts import MEASURED_NOTHING, ONE_CANDIDATE, doubt, doubtful, least_ms
from pipeline.tune.state import TAKEN_UP, StateUnusable, all_terms, find_kept, forget, open_state, terms
from pipeline.tune.strategy import (
    STRATEGIES,
    FlashInferOfNoVersion,
    FlashInferTooOld,
    StrategyRefused,
    check_version,
    choose,
    deal,
    weights,
)

BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}


def gemm(name: str, n: int, k: int, buckets: tuple[int, ...] = (1, 64, 8192), **more: object) -> OpPlan:
    return OpPlan(name, "mm_bf16", {"n": n, "k": k}, BF16, buckets, **more)


def plan_of(*ops: OpPlan, layout: Layout | None = None) -> Plan:
    return Plan("m", "cuda", "90a", "0.6.16.post3", layout or Layout(tp=2), ops or (gemm("qkv", 64, 64),))


def test_versions_that_may_be_tuned_with() -> None:
    for version in ("0.6.16", "0.6.16.post3", "0.6.18.post1", "0.7.4", "1.0"):
        check_version(version)
    for version in ("", "None", "main-abc"):
        with pytest.raises(FlashInferOfNoVersion, match="nothing can be said"):
            check_version(version)
    for version in ("0.6.15.post1", "0.6.13", "0.6.12", "0.2", "0.6.16rc1"):
        with pytest.raises(FlashInferTooOld, match="no process group") as caught:
            check_version(version)
        assert ("collide" in caught.value.message) == (version in ("0.6.12", "0.2"))


def test_the_default_follows_what_flashinfer_has() -> None:
    choice = choose("", plan_of(), 2, version="0.7.4", process_group=True)
    assert (choice.name, choice.in_step) == ("synchronized", True)
    assert choice.reason.startswith("FlashInfer 0.7.4 has set_autotune_process_group: 2 ranks averaged")
    choice = choose("", plan_of(), 2, version="0.7.4", process_group=False)
    assert (choice.name, choice.in_step) == ("sharded", False)
    assert choice.reason.startswith("FlashInfer 0.7.4 lacks set_autotune_process_group: ")


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_asked_for_is_taken(name: str) -> None:
    choice = choose(name, plan_of(), 2, version="0.7.4", process_group=True)
    assert choice.name == name
    assert choice.reason.startswith("asked for: ")


def test_synchronized_needs_a_process_group() -> None:
    with pytest.raises(StrategyRefused, match="lacks set_autotune_process_group"):
        choose("synchronized", plan_of(), 2, version="0.7.4", process_group=False)


def test_leader_is_refused_where_ranks_need_each_other() -> None:
    moe = OpPlan("moe", "cutlass_fused_moe", {"experts": 8, "ep": 2}, BF16, (1,))
    for plan in (plan_of(layout=Layout(tp=2, ep=2)), plan_of(moe)):
        with pytest.raises(LeaderUnfit, match="ranks that wait for a leader time out"):
            choose("leader", plan, 2, version="0.7.4", process_group=True)


def test_a_leader_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the host before it looks for an engine, by the tuner before it starts a rank."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the tuner's own handler is not for this process
    words = ["tiny-moe", "--tp", "4", "--ep", "4", "--device", "cpu"]
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "--output", str(file)]) == 0
    capsys.readouterr()
    assert main(["build", *words, "--strategy", "leader"]) == 2
    told = capsys.readouterr().err
    assert tuner([str(file), str(tmp_path / "out"), "--strategy", "leader"]) == 2
    for err in (told, capsys.readouterr().err):
        assert err.startswith("error: --strategy leader with EP=4: in an all-to-all")
        assert "hint: use --strategy synchronized or sharded" in err


def test_dealing_shares_the_work_evenly_and_completely() -> None:
    buckets = tuple(2**i for i in range(14))
    plan = plan_of(gemm("qkv", 6144, 4096, buckets), gemm("o", 4096, 4096, buckets), gemm("up", 28672, 4096, buckets))
    work = {i: op.buckets for i, op in enumerate(plan.ops)}
    dealt = deal(plan, work, [(0, 1, 2, 3)] * 3)
    units = [(rank, i, b) for rank, ops in dealt.items() for i, found in ops.items() for b in found]
    assert sorted((i, b) for _, i, b in units) == sorted((i, b) for i, found in work.items() for b in found)
    loads = [sum(weights(plan.ops[i]) * (b + 256) for r, i, b in units if r == rank) for rank in range(4)]
    dearest = max(weights(plan.ops[i]) * (b + 256) for _, i, b in units)
    assert max(loads) <= max(dearest, 1.1 * sum(loads) / 4)
    assert min(loads) > 0.8 * sum(loads) / 4


@given(
    st.lists(st.tuples(st.sampled_from([64, 128, 4096]), st.sampled_from([64, 256])), min_size=1, max_size=6),
    st.integers(1, 5),
    st.data(),
)
def test_dealing_respects_holders_and_equal_keys(
    shapes: list[tuple[int, int]], world: int, data: st.DataObject
) -> None:
    ops = tuple(gemm(f"op{i}", n, k) for i, (n, k) in enumerate(shapes))
    plan = plan_of(*ops)
    everyone = tuple(range(world))
    dealt = deal(plan, {i: op.buckets for i, op in enumerate(ops)}, [everyone] * len(ops))
    owner = {(i, b): rank for rank, found in dealt.items() for i, buckets in found.items() for b in buckets}
    assert len(owner) == sum(len(op.buckets) for op in ops)
    for (i, b), rank in owner.items():
        assert rank in everyone
        assert {owner[j, b] for j, op in enumerate(ops) if op.shape == ops[i].shape} == {rank}
    alone = data.draw(st.integers(0, world - 1))
    holders = [everyone] * len(ops)
    holders[0] = (alone,)
    only = deal(plan_of(ops[0]), {0: ops[0].buckets}, holders[:1])
    assert only == {alone: {0: ops[0].buckets}}


def test_an_entry_belongs_to_the_rank_that_says_so() -> None:
    results = [RankResult(0, {"a": Held("R", 1)}, {0: ["a"]}), RankResult(1, {"b": Held("R", 2)}, {0: ["b"]})]
    union, owners = merge(results, None)
    assert set(union) == {"a", "b"}
    assert owners == {"a": (0,), "b": (1,)}
    with pytest.raises(EntryElsewhere):
        merge([results[0], RankResult(1, {}, {0: ["b"]})], None)
    with pytest.raises(TacticsDiffer) as caught:
        merge([results[0], RankResult(1, {"a": Held("R", 9)}, {0: ["a"]})], None, "try another way")
    assert caught.value.hint == "try another way"


def test_two_ranks_on_one_gpu_are_named() -> None:
    facts = [{"rank": r, "host": "h", "uuid": uuid} for r, uuid in enumerate(["GPU-a", "GPU-b", "GPU-a"])]
    with pytest.raises(GpuShared, match="rank 2 is on the GPU of rank 0: GPU-a"):
        one_gpu_each(facts)
    one_gpu_each(facts[:2])
    one_gpu_each([{**fact, "uuid": ""} for fact in facts])  # processors
    one_gpu_each([facts[0], {**facts[2], "host": "other"}])


def test_odd_choices_are_noted() -> None:
    assert doubt([1.0, math.inf], 0.1) == ONE_CANDIDATE
    assert doubt([0.0, 0.0], 0.0).startswith(MEASURED_NOTHING)
    assert doubt([0.001, 0.002], 0.01).startswith(MEASURED_NOTHING)
    assert doubt([0.001, 0.02], 0.01) == ""
    assert doubt([], 1.0) == doubt([math.inf], 1.0) == ""
    op = gemm("up", 28672, 8192)
    assert least_ms(op, 8192) == pytest.approx(2e3 * 8192 * 28672 * 8192 / 2e16)
    rows = [Covered("up", b, f"k{b}", "R", 1, 1, note=ONE_CANDIDATE) for b in (1, 8)]
    assert doubtful([*rows, Covered("o", 1, "k", "R", 1, 2)]) == [f"up at 1, 8 tokens: {ONE_CANDIDATE}"]


def test_weights_of_experts() -> None:
    shape = {"experts": 8, "local_experts": 4, "top_k": 2, "hidden": 16, "intermediate": 32}
    assert weights(OpPlan("moe", "cutlass_fused_moe", shape, BF16, (1,))) == 3 * 16 * 32


def test_skip_ops_by_either_name() -> None:
    assert is_skipped("mm_fp4", ["fp4_gemm"])
    assert is_skipped("mm_fp4", ["mm_fp4"])
    assert not is_skipped("mm_fp4", ["fp8_gemm"])
    one, other = TUNED_AS["cutlass_fused_moe"]
    assert not is_skipped("cutlass_fused_moe", [one])
    assert is_skipped("cutlass_fused_moe", [one, other])
    assert not is_skipped("unknown", [])


class TestKept:
    """Files of an interrupted run, judged by the leader."""

    DECIDING: ClassVar = {"strategy": "synchronized", "ranks": 2}

    def write(self, place: Path, plan: Plan, **changes: object) -> Path:
        from pipeline.contract.digest import sha256_json

        body = {
            "ended": "2026-01-01T00:00:00+00:00",
            "entries": {"k1": {"runner": "R", "tactic": [1, "x"], "policy": None, "selection": None}},
            "covered": [{"op": "qkv", "bucket": 1, "entry": "k1", "runner": "R", "tactic": [1, "x"], "candidates": 3}],
            **changes,
        }
        path = place / f"{terms(plan, plan.ops[0], self.DECIDING)}-00000000.json"
        path.write_text(json.dumps({"sha256": sha256_json(body), "body": body}))
        return path

    def test_a_sound_file_is_taken_up_under_the_plans_name(self, tmp_path: Path) -> None:
        plan = plan_of()
        self.write(tmp_path, plan)
        renamed = replace(plan, ops=(replace(plan.ops[0], name="other name", buckets=(1, 2)),))
        for used in (plan, renamed):
            kept = find_kept(tmp_path, used, self.DECIDING)
            assert kept.entries == {"k1": Held("R", [1, "x"])}
            assert [(row.op, row.bucket, row.note) for row in kept.covered] == [(used.ops[0].name, 1, TAKEN_UP)]
            assert kept.notes == (f"took up 1 buckets of 1 ops from an interrupted run: {used.ops[0].name}",)

    @pytest.mark.parametrize("what", ["dtypes", "strategy", "round_up", "seed"])
    def test_other_terms_are_left_alone(self, tmp_path: Path, what: str) -> None:
        plan = plan_of()
        path = self.write(tmp_path, plan)
        deciding = {**self.DECIDING, "strategy": "sharded"} if what == "strategy" else self.DECIDING
        if what == "dtypes":
            plan = plan_of(replace(plan.ops[0], dtypes={**BF16, "a": "float16"}))
        elif what != "strategy":
            plan = replace(plan, **{what: True if what == "round_up" else 7})
        kept = find_kept(tmp_path, plan, deciding)
        assert (kept.entries, kept.covered, kept.notes) == ({}, (), ())
        forget(tmp_path, all_terms(plan, deciding))
        assert path.exists()

    @pytest.mark.parametrize("damage", ["cut", "deep", "list", "edited", "row", "no entry", "nothing timed", "field"])
    def test_damage_is_refused_and_said(self, tmp_path: Path, damage: str) -> None:
        plan = plan_of()
        path = self.write(tmp_path, plan)
        row = json.loads(path.read_text())["body"]["covered"][0]
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-9])
        elif damage == "deep":
            path.write_text("[" * 100_000)
        elif damage == "list":
            path.write_text("[]")
        elif damage == "edited":
            path.write_text(path.read_text().replace('"x"', '"y"'))
        else:
            wrong = {"row": {"tactic": [2]}, "no entry": {"entry": "k2"}, "nothing timed": {"candidates": 0}}
            self.write(tmp_path, plan, covered=[{**row, **wrong.get(damage, {"unheard": 1})}])
        kept = find_kept(tmp_path, plan, self.DECIDING)
        assert (kept.entries, kept.covered) == ({}, ())
        assert len(kept.notes) == 1
        assert "was not taken up" in kept.notes[0]

    def test_forgetting_removes_what_belongs_to_the_plan(self, tmp_path: Path) -> None:
        plan = plan_of()
        path = self.write(tmp_path, plan)
        (tmp_path / "other.json").write_text("{}")
        half = tmp_path / f".{path.name}.x7_k"  # left by a rank that was ended while it wrote
        half.write_text("{")
        assert len(find_kept(tmp_path, plan, self.DECIDING).covered) == 1
        forget(tmp_path, all_terms(plan, self.DECIDING))
        assert [one.name for one in tmp_path.iterdir()] == ["other.json"]
        forget(None, all_terms(plan, self.DECIDING))

    def test_nothing_is_found_nowhere(self, tmp_path: Path) -> None:
        assert find_kept(None, plan_of(), self.DECIDING).notes == ()
        assert find_kept(tmp_path / "absent", plan_of(), self.DECIDING).notes == ()

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StateUnusable) as caught:
            open_state(tmp_path / "file" / "state")
        assert isinstance(caught.value, UsageError)
        assert open_state(tmp_path / "a" / "b") == tmp_path / "a" / "b"
