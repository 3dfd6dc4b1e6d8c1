"""Facts of FlashInfer: versions in order, GPUs by name, and MoE layers that one cache file cannot keep apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from packaging.version import Version

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer import features
from pipeline.flashinfer.gpus import GPUS, KNOWN_SM, arch_choices, arch_name, find_arch
from pipeline.flashinfer.moe_keys import key_problems, overwriting
from pipeline.planning.plan import _without_collisions

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
    planned, lost = _without_collisions(layers, old)
    assert planned == [router]
    assert [one.name for one in lost] == ["a", "b"]
    assert all(f"{new} tells them apart" in one.reason for one in lost)
    assert len(key_problems(layers, old)) == 1
    assert key_problems(planned, old) == []
    assert _without_collisions(layers, new) == (layers, [])


def test_the_same_layer_on_other_ranks_or_one_that_keys_tell_apart_stays() -> None:
    same = [layer("a", "trtllm_bf16_moe", (0,)), layer("b", "trtllm_bf16_moe", (1,))]
    assert overwriting(same, "0.6.16.post3") == []
    other = [layer("a", "trtllm_bf16_moe"), layer("b", "trtllm_bf16_moe", hidden=2048)]
    assert overwriting(other, "0.6.16.post3") == []


ORDERED = [
    "0.6.12", "0.6.13", "0.6.16rc1", "0.6.16", "0.6.16.post3", "0.7.2b2", "0.7.2", "0.7.2.post1", "0.7.4.dev5", "0.7.4",
    "0.7.4.post1", "0.10.0", "1",
]  # fmt: skip


def test_versions_are_ordered_as_pip_orders_them() -> None:
    for one, other in itertools.product(ORDERED, repeat=2):
        assert (features.order(one) < features.order(other)) is (Version(one) < Version(other)), (one, other)
    assert features.order("0.7.4+cu130") == features.order("v0.7.4") == features.order("0.7.4.0")
    assert not any(map(features.is_version, ("", "main-abc", "0.7.4-custom", "0" * 99, "x0.7")))


@pytest.mark.parametrize(
    ("feature", "has", "lacks"),
    [
        (features.BF16_ANY_COUNT, "0.7.4 0.7.4.post1 0.9", "0.7.2.post1 0.7.4rc1 0.7.4.dev20261101"),
        (features.MOE_RANK_IN_KEY, "0.6.18 0.7.1 0.7.2rc1", "0.6.17 0.6.18rc1 0.7.2 0.7.4"),
        (features.PROCESS_GROUP, "0.6.16 0.6.16.post3", "0.6.15.post1 0.6.16rc1"),
    ],
)
def test_a_release_candidate_comes_before_its_release(feature: features.Feature, has: str, lacks: str) -> None:
    assert all(feature.of(version) for version in has.split())
    assert not any(feature.of(version) for version in lacks.split())
    assert bool(features.too_old("0.6.16rc1")) and not features.too_old("0.6.16")


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        *((spelled, "90a") for spelled in ("90a", "9.0a", "9.0", "sm_90a", "SM90a", "90", "h100", "H200", "GH200")),
        ("NVIDIA H100 80GB HBM3", "90a"), ("H100-SXM", "90a"), ("A100-SXM4-80GB", "80"), ("nvidia-l40s", "89"),
        ("b200", "100a"), ("GB200", "100a"), ("gb200 nvl72", "100a"), ("b300", "103a"), ("rtx_5090", "120f"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "120f"), ("GeForce RTX 4090", "89"), ("100f", "100f"),
        ("h300", ""), ("", ""), ("75", ""), ("gpu", ""), ("٩٠", ""), ("x" * 9999, ""),
    ],
)  # fmt: skip
def test_gpus_are_known_by_name_and_architecture(text: str, arch: str) -> None:
    assert find_arch(text) == arch


def test_what_is_offered_in_place_of_a_wrong_gpu() -> None:
    assert arch_choices("hh200").startswith("did you mean h200 (90a)? ")
    assert all(name in arch_choices() for name in GPUS)
    assert {*GPUS.values()} == {*KNOWN_SM} and arch_name(120) == "120f"


def test_docs_show_the_table_of_features() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md").read_text()
    for feature in features.TABLE:
        assert f"| {feature.what} | {feature.since} | {feature.until or '–'} |" in text, feature
