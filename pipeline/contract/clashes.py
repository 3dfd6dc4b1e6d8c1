"""MoE layers whose entries would overwrite each other, because FlashInfer writes too little into an op's keys, and
such as find none of each other's, because it writes too much.

- `cutlass_fused_moe` writes the shapes of its weights alone up to 0.6.17, and its rank as well from 0.6.18 to 0.7.1.
- The trtllm-gen ops write the shapes of inputs and output alone up to 0.6.18.post1: neither the intermediate size, the
  experts of a rank, nor the layout of the weights, which their keys hold from 0.7.0 on. `top_k` is in the shapes of
  `trtllm_fp8_per_tensor_scale_moe` and `trtllm_fp4_block_scale_moe` alone.

Read in the published packages, and held against the keys of 0.6.16.post3 and 0.7.4 by a test.
"""

from __future__ import annotations

from collections.abc import Sequence

from .mended import MOE_KEY_TOLD_APART, MOE_KEY_WITHOUT_RANK, TRTLLM_KEY_TOLD_APART, release
from .plan import OpPlan

_SHAPES = {
    "cutlass_fused_moe": ("local_experts", "hidden", "intermediate"),
    "trtllm_bf16_moe": ("experts", "hidden"),
    "trtllm_fp8_per_tensor_scale_moe": ("experts", "hidden", "top_k"),
    "trtllm_fp8_block_scale_moe": ("experts", "hidden"),
    "trtllm_fp4_block_scale_moe": ("experts", "hidden", "top_k"),
}


def mended(op: OpPlan) -> str:
    """The first FlashInfer whose keys tell layers of this op apart."""
    return MOE_KEY_TOLD_APART if op.op == "cutlass_fused_moe" else TRTLLM_KEY_TOLD_APART


def _holds_rank(op: OpPlan, version: str) -> bool:
    """Whether each rank would ask for an entry of its own, which the others cannot agree on."""
    divided = op.op == "cutlass_fused_moe" and max(op.shape["tp"], op.shape["ep"]) > 1
    return divided and release(mended(op)) <= release(version) < release(MOE_KEY_WITHOUT_RANK)


def overwriting(ops: Sequence[OpPlan], version: str) -> list[tuple[OpPlan, OpPlan]]:
    """Pairs of different layers whose entries would overwrite each other in this FlashInfer."""
    seen: dict[tuple[object, ...], OpPlan] = {}
    found = []
    for op in ops:
        if op.op not in _SHAPES or release(version) >= release(mended(op)):
            continue
        key = (op.op, op.options.get("format"), *(op.shape[name] for name in _SHAPES[op.op]))
        other = seen.setdefault(key, op)
        if {**other.meaning(), "ranks": []} != {**op.meaning(), "ranks": []}:
            found.append((other, op))
    return found


def clashes(ops: Sequence[OpPlan], version: str) -> list[str]:
    """What is wrong with these layers in this FlashInfer, a line each; layers that no two ranks share among them."""
    found = [
        f"FlashInfer {version} writes the rank into the keys of {op.name}, so that no rank finds what another "
        f"has tuned (mended in {MOE_KEY_WITHOUT_RANK})"
        for op in ops
        if _holds_rank(op, version)
    ]
    return found + [
        f"{other.name} and {op.name} have equal shapes: in FlashInfer {version} their entries overwrite "
        f"each other (mended in {mended(op)})"
        for other, op in overwriting(ops, version)
    ]
