"""What a trtllm-gen kernel without block scales makes of the arguments of a call, in float32: routing from logits,
weights read from the layout that the call names, the scales where FlashInfer's launcher applies them
(csrc/trtllm_fused_moe_kernel_launcher.cu).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """[experts, rows, columns], from blocks of columns where there are any."""
    if weight.dim() == 3:
        return weight.float()
    experts, blocks, rows, wide = weight.shape
    return weight.permute(0, 2, 1, 3).reshape(experts, rows, blocks * wide).float()


def run(heard: Mapping[str, Any]) -> torch.Tensor:
    """The output for what a call was given, bfloat16."""
    x, top_k, local = heard["hidden_states"].float(), heard["top_k"], heard["local_num_experts"]
    first, second = _rows(heard["gemm1_weights"]), _rows(heard["gemm2_weights"])
    ones = torch.ones(local)
    into, gate, out_of = (
        heard.get(name, ones)
        for name in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
    )
    assert heard["intermediate_size"] == second.shape[2]
    shares = torch.zeros(x.shape[0], heard["num_experts"])
    chosen = heard["routing_logits"].float().topk(top_k, dim=1).indices
    shares.scatter_(1, chosen, 1 / top_k)
    out = torch.zeros(x.shape[0], second.shape[1])
    for expert in range(local):
        up, gated = (x @ half.T for half in first[expert].chunk(2))
        between = up * into[expert] * torch.nn.functional.silu(gated * gate[expert])
        between = between.to(heard["gemm1_weights"].dtype).float()
        share = shares[:, heard["local_expert_offset"] + expert, None]
        out += share * (between @ second[expert].T * out_of[expert])
    return out.bfloat16()
