"""What the MoE calls through the trtllm-gen kernels share.

Compute capability 10.0 and 10.3: no GPU has run them yet.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.contract.plan import OpPlan

from .cuda import spec
from .moe import Sizes

CAPABLE = (100, 103)
# FlashInfer's RoutingMethodType by the plan's words
_ROUTING = {"default": "Default", "renormalize": "Renormalize", "renormalize_naive": "RenormalizeNaive",
            "deepseek_v3": "DeepSeekV3"}  # fmt: skip


def modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - one module for all
    """The JIT module that loads the trtllm-gen kernels."""
    return [spec("flashinfer.jit.fused_moe", "gen_trtllm_gen_fused_moe_sm100_module")]


def layer(op: OpPlan, sizes: Sizes) -> dict[str, Any]:
    """The arguments that say which experts there are, which of them this rank has, and how tokens choose theirs."""
    from flashinfer.fused_moe import RoutingMethodType

    options = op.options
    grouped = int(options.get("n_group", "1")) > 1
    return {
        "num_experts": sizes.experts,
        "top_k": sizes.top_k,
        "n_group": int(options["n_group"]) if grouped else None,
        "topk_group": int(options["topk_group"]) if grouped else None,
        "intermediate_size": sizes.inner,
        "local_expert_offset": sizes.first,
        "local_num_experts": sizes.local,
        "routed_scaling_factor": None,
        "routing_method_type": int(RoutingMethodType[_ROUTING[options["routing_method"]]]),
        "tune_max_num_tokens": op.buckets[-1],
    }


def block_major(weight: torch.Tensor) -> torch.Tensor:
    """[experts, rows, columns] → [experts, blocks, rows, columns of a block]; a block is 128 bytes wide."""
    experts, rows, columns = weight.shape
    wide = 128 // weight.element_size()
    return weight.reshape(experts, rows, columns // wide, wide).permute(0, 2, 1, 3).contiguous()


def output(found: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """The layer's output: alone, or the first of what a call returns."""
    return found[0] if isinstance(found, list) else found
