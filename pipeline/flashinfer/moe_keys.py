"""MoE layers whose entries one cache file cannot keep apart, and layers whose entries the ranks cannot share.

- Keys of `cutlass_fused_moe` contain the shapes of its weights alone before 0.6.18; from 0.6.18 to 0.7.1 the rank too.
- Keys of the trtllm-gen ops contain the shapes of inputs and output alone before 0.7.0: neither the intermediate size,
  the experts of a rank, nor the layout of the weights. `top_k` is in the shapes of
  `trtllm_fp8_per_tensor_scale_moe` and `trtllm_fp4_block_scale_moe` alone.

Read in the published packages, and compared with the keys of 0.6.16.post3 and 0.7.4 by a test.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.plan import OpPlan

from .features import MOE_LAYERS_APART, MOE_RANK_IN_KEY, TRTLLM_LAYERS_APART, Feature

_SHAPES = {
    "cutlass_fused_moe": ("local_experts", "hidden", "intermediate"),
    "trtllm_bf16_moe": ("experts", "hidden"),
    "trtllm_fp8_per_tensor_scale_moe": ("experts", "hidden", "top_k"),
    "trtllm_fp8_block_scale_moe": ("experts", "hidden"),
    "trtllm_fp4_block_scale_moe": ("experts", "hidden", "top_k"),
}


def layers_apart(op: str) -> Feature:
    """The feature by which keys tell layers of a MoE op apart."""
    return MOE_LAYERS_APART if op == "cutlass_fused_moe" else TRTLLM_LAYERS_APART


def overwriting(ops: Sequence[OpPlan], version: str) -> list[tuple[OpPlan, OpPlan]]:
    """Pairs of different layers whose entries would overwrite each other in this FlashInfer."""
    seen: dict[tuple[object, ...], OpPlan] = {}
    found = []
    for op in ops:
        if op.op not in _SHAPES or layers_apart(op.op).of(version):
            continue
        key = (op.op, op.options.get("format"), *(op.shape[name] for name in _SHAPES[op.op]))
        other = seen.setdefault(key, op)
        if {**other.meaning(), "ranks": []} != {**op.meaning(), "ranks": []}:
            found.append((other, op))
    return found


def rank_in_key(op: OpPlan, version: str) -> str:
    """Why no rank finds what another has tuned of this op, in one line; empty where ranks share its entries."""
    divided = op.op == "cutlass_fused_moe" and max(op.shape["tp"], op.shape["ep"]) > 1
    if not divided or not MOE_RANK_IN_KEY.of(version):
        return ""
    return (
        f"FlashInfer {version} writes the rank into the keys of {op.op}, so that no rank finds what another has tuned "
        f"(fixed in {MOE_RANK_IN_KEY.until})"
    )


def key_problems(ops: Sequence[OpPlan], version: str) -> list[str]:
    """What keeps these layers out of one cache file in this FlashInfer, a line each."""
    found = [f"{op.name}: {why}" for op in ops if (why := rank_in_key(op, version))]
    return found + [
        f"{other.name} and {op.name} have equal shapes: in FlashInfer {version} their entries overwrite "
        f"each other (fixed in {layers_apart(op.op).since})"
        for other, op in overwriting(ops, version)
    ]
