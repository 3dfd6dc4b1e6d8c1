"""How ranks share the work, and what they must agree on: the parts that need no torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.flashinfer.ops import TUNED_AS, LeaderUnfit, is_skipped
from pipeline.tune.agreement import (
    EntryElsewhere,
    GpuShared,
    Held,
    RankResult,
    RanksDiffer,
    TacticsDiffer,
    agree,
    merge,
    one_gpu_each,
)
from pipeline.tune.strategies import (
    STRATEGIES,
    FlashInferOfNoVersion,
    FlashInferTooOld,
    StrategyRefused,
    check_version,
    choose,
    deal,
    share,
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
        with pytest.raises(FlashInferOfNoVersion, match="cannot be compared"):
            check_version(version)
    for version in ("0.6.15.post1", "0.6.13", "0.6.12", "0.2", "0.6.16rc1"):
        with pytest.raises(FlashInferTooOld, match="no process group") as caught:
            check_version(version)
        assert ("collide" in caught.value.message) == (version in ("0.6.12", "0.2"))


def test_a_strategy_is_what_was_asked_for_or_the_best_that_flashinfer_allows() -> None:
    for asked in STRATEGIES:
        found = choose(asked, plan_of(), 2, version="0.7.4", process_group=True)
        assert (found.name, found.reason.partition(": ")[0]) == (asked, "asked for")
    for group, name, has in ((True, "synchronized", "has"), (False, "sharded", "lacks")):
        found = choose("", plan_of(), 2, version="0.7.4", process_group=group)
        assert found.name == name
        assert found.reason.startswith(f"FlashInfer 0.7.4 {has} set_autotune_process_group: ")
    with pytest.raises(StrategyRefused, match="lacks set_autotune_process_group"):
        choose("synchronized", plan_of(), 2, version="0.7.4", process_group=False)
    moe = OpPlan("moe", "cutlass_fused_moe", {"experts": 8, "ep": 2}, BF16, (1,))
    for plan in (plan_of(layout=Layout(tp=2, ep=2)), plan_of(moe)):
        with pytest.raises(LeaderUnfit, match="ranks that wait for a leader time out"):
            choose("leader", plan, 2, version="0.7.4", process_group=True)


def test_each_strategy_that_tunes_apart_has_its_shares() -> None:
    plan = plan_of(gemm("qkv", 64, 64), gemm("o", 64, 96, ranks=(1,)))
    known = [{0: (1, 64)}, {0: (1, 64), 1: (8192,)}]
    shares = {
        name: [share(name, plan, known, rank) for rank in (0, 1)] for name in ("leader", "independent", "sharded")
    }
    assert shares["leader"] == [{0: (1, 64)}, {1: (8192,)}]
    assert shares["independent"] == [{0: (1, 64)}, {0: (1, 64), 1: (8192,)}]
    units = [(index, bucket) for one in shares["sharded"] for index, buckets in one.items() for bucket in buckets]
    assert sorted(units) == [(0, 1), (0, 64), (1, 8192)]
    assert 1 not in shares["sharded"][0]


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
    everyone = tuple(range(world))
    dealt = deal(plan_of(*ops), {i: op.buckets for i, op in enumerate(ops)}, [everyone] * len(ops))
    owner = {(i, b): rank for rank, found in dealt.items() for i, buckets in found.items() for b in buckets}
    assert len(owner) == sum(len(op.buckets) for op in ops)
    for (i, b), rank in owner.items():
        assert rank in everyone
        assert {owner[j, b] for j, op in enumerate(ops) if op.shape == ops[i].shape} == {rank}
    alone = data.draw(st.integers(0, world - 1))
    assert deal(plan_of(ops[0]), {0: ops[0].buckets}, [(alone,)]) == {alone: {0: ops[0].buckets}}


def test_weights_of_experts_and_names_that_are_skipped() -> None:
    shape = {"experts": 8, "local_experts": 4, "top_k": 2, "hidden": 16, "intermediate": 32}
    assert weights(OpPlan("moe", "cutlass_fused_moe", shape, BF16, (1,))) == 3 * 16 * 32
    assert is_skipped("mm_fp4", ["fp4_gemm"]) and is_skipped("mm_fp4", ["mm_fp4"])
    assert not is_skipped("mm_fp4", ["fp8_gemm"]) and not is_skipped("unknown", [])
    one, other = TUNED_AS["cutlass_fused_moe"]
    assert not is_skipped("cutlass_fused_moe", [one]) and is_skipped("cutlass_fused_moe", [one, other])


@pytest.mark.parametrize(
    ("said", "message", "detail"),
    [
        ([{"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 2]}, {"a": 1, "b": [1]}], "rank 2 differs from the others in b now",
         "rank 2 differs in b: [1] (rank 0 has [1, 2])"),
        ([{"a": 9}, {"a": 1}, {"a": 1}], "rank 0 differs from the others in a now", "rank 0 differs in a: 9 (rank 1 has 1)"),
        ([{"b": 2}, {}], "rank 1 differs from the others in b now", "rank 1 differs in b: null (rank 0 has 2)"),
        ([{"b": {"x": 1, "y": 2}}, {"b": {"x": 1, "y": 3}}], "rank 1 differs from the others in b now",
         'rank 1 differs in b: {"y": 3} (rank 0 has {"y": 2})'),
    ],
)  # fmt: skip
def test_agreement_names_rank_field_and_the_part_that_differs(said: list[dict], message: str, detail: str) -> None:
    with pytest.raises(RanksDiffer) as caught:
        agree(said, "now")
    assert (caught.value.message, caught.value.details) == (message, (detail,))
    agree([said[0]] * 3, "now")


def test_merge_takes_the_union_and_records_owners() -> None:
    both, mine = Held("R", 1, ["p"], {"time_ms": 0.1}), Held("R", [2, "x"])
    theirs = Held("R", 1, ["p"], {"time_ms": 0.2})  # measured times may differ
    results = [RankResult(0, {"k": both}, {0: ["k"]}), RankResult(1, {"k": theirs, "m": mine}, {0: ["k"], 1: ["m"]})]
    assert merge(results, [(0, 1), (1,)]) == ({"k": both, "m": mine}, {"m": (1,)})
    alone = [RankResult(0, {"a": both}, {0: ["a"]}), RankResult(1, {"b": mine}, {0: ["b"]})]
    assert merge(alone, None) == ({"a": both, "b": mine}, {"a": (0,), "b": (1,)})


def test_merge_refuses_two_tactics_and_entries_that_are_elsewhere() -> None:
    one, other = RankResult(0, {"k": Held("R", 1)}, {0: ["k"]}), RankResult(1, {"k": Held("R", 2)}, {0: ["k"]})
    with pytest.raises(TacticsDiffer) as caught:
        merge([one, other], [(0, 1)], "try another way")
    assert caught.value.message == "rank 1 chose another tactic than rank 0 for k"
    assert caught.value.details == ('k: rank 0 chose ["R", 1], rank 1 chose ["R", 2]',)
    assert caught.value.hint == "try another way"
    for second, holders in (
        (RankResult(1, {}, {}), [(0, 1)]),
        (RankResult(1, {}, {}), [(1,)]),
        (RankResult(1, {}, {0: ["b"]}), None),
    ):
        with pytest.raises(EntryElsewhere):
            merge([one, second], holders)


def test_two_ranks_on_one_gpu_are_named() -> None:
    facts = [{"rank": r, "host": "h", "uuid": uuid} for r, uuid in enumerate(["GPU-a", "GPU-b", "GPU-a"])]
    with pytest.raises(GpuShared, match="rank 2 is on the GPU of rank 0: GPU-a"):
        one_gpu_each(facts)
    one_gpu_each(facts[:2])
    one_gpu_each([{**fact, "uuid": ""} for fact in facts])  # processors
    one_gpu_each([facts[0], {**facts[2], "host": "other"}])
