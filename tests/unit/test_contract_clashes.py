"""Layers that one file cannot hold: the planner leaves out what the ranks would refuse."""

from __future__ import annotations

import pytest

from pipeline.contract.clashes import clashes, overwriting
from pipeline.contract.plan import OpPlan
from pipeline.planning.make import _told_apart

SHAPE = {"experts": 8, "local_experts": 8, "hidden": 1024, "intermediate": 512, "top_k": 2, "tp": 1, "ep": 1}


def layer(name: str, op: str, ranks: tuple[int, ...] = (), **shape: int) -> OpPlan:
    return OpPlan(name, op, {**SHAPE, **shape}, {}, (1, 2), ranks=ranks)


@pytest.mark.parametrize(
    ("op", "old", "new", "left_out"),
    [
        ("cutlass_fused_moe", "0.6.16.post3", "0.6.18", {"top_k": 4}),
        ("trtllm_bf16_moe", "0.6.18.post1", "0.7.0", {"intermediate": 256}),
        ("trtllm_fp4_block_scale_moe", "0.6.16.post3", "0.7.0", {"local_experts": 4}),
    ],
)
def test_what_the_ranks_refuse_is_not_planned(op: str, old: str, new: str, left_out: dict[str, int]) -> None:
    router = OpPlan("router", "mm_bf16", {"n": 8, "k": 1024}, {}, (1, 2))
    layers = [router, layer("a", op), layer("b", op, **left_out)]
    planned, lost = _told_apart(layers, old)
    assert planned == [router]
    assert [one.name for one in lost] == ["a", "b"]
    assert all(f"{new} tells them apart" in one.reason for one in lost)
    assert len(clashes(layers, old)) == 1
    assert clashes(planned, old) == []
    assert _told_apart(layers, new) == (layers, [])


def test_the_same_layer_on_other_ranks_or_one_that_keys_tell_apart_stays() -> None:
    same = [layer("a", "trtllm_bf16_moe", (0,)), layer("b", "trtllm_bf16_moe", (1,))]
    assert overwriting(same, "0.6.16.post3") == []
    other = [layer("a", "trtllm_bf16_moe"), layer("b", "trtllm_bf16_moe", hidden=2048)]
    assert overwriting(other, "0.6.16.post3") == []
