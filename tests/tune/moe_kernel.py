"""What the kernels of two MoE ops make of the arguments of a call, in float32.

A trtllm-gen kernel without block scales: routing from logits, weights read from the layout that the call names, the
scales where FlashInfer's launcher applies them (csrc/trtllm_fused_moe_kernel_launcher.cu). And `cutlass_fused_moe` with
mxfp4 weights (csrc/fused_moe/cutlass_backend): the weights from `laid`, which stands for FlashInfer's own interleaving,
since that runs on a GPU alone; the scales as its helper lays them.
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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def laid(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """Another order of the bytes of a row, so that weights which were not laid show."""
    assert quant_type == "fp4"
    assert weight.dtype == torch.uint8
    return weight.flip(-1)


def _mxfp4(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, rows, columns] from laid bytes and scales in E8M0, four of which lie side by side for 128 columns.

    Up to 0.6.16.post3 [experts, columns / 128, rows * 4], in 0.7.4 [experts, rows / 64, columns / 128, 16, 16]: of 64
    rows the first, the 17th, the 33rd and the 49th, then the next of each.
    """
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    packed = laid(weight).long()
    experts, rows, half = packed.shape
    values = torch.stack((table[packed % 16], table[packed // 16]), dim=-1).reshape(experts, rows, 2 * half)
    wide = half // 64
    if scales.dim() == 3:
        plain = scales.reshape(experts, wide, rows, 4).transpose(1, 2)
    else:
        plain = scales.reshape(experts, rows // 64, wide, 16, 4, 4).permute(0, 1, 4, 3, 2, 5)
    plain = plain.reshape(experts, rows, 4 * wide)
    return values * 2.0 ** (plain.float() - 127).repeat_interleave(32, dim=2)


def run_cutlass_mxfp4(heard: Mapping[str, Any]) -> torch.Tensor:
    """The output for what a call was given, bfloat16: the first product is stored in bfloat16, and so is the next."""
    assert heard["use_w4_group_scaling"] is True
    assert heard["output_dtype"] == heard["input"].dtype == torch.bfloat16
    x, scales, chosen = heard["input"].float(), heard["quant_scales"], heard["token_selected_experts"]
    first = _mxfp4(heard["fc1_expert_weights"], scales[0])
    second = _mxfp4(heard["fc2_expert_weights"], scales[1])
    into, out_of = heard["fc1_expert_biases"].float(), heard["fc2_expert_biases"].float()
    alpha, beta, limit = (heard[f"swiglu_{name}"] for name in ("alpha", "beta", "limit"))
    out = torch.zeros(x.shape[0], second.shape[1])
    for expert in range(first.shape[0]):
        both = (x @ first[expert].T).bfloat16().float() + into[expert]
        linear, gate = both.chunk(2, dim=1)
        linear, gate = linear.clamp(-limit[expert], limit[expert]), gate.clamp(max=limit[expert])
        between = (gate * torch.sigmoid(alpha[expert] * gate) * (linear + beta[expert])).bfloat16().float()
        result = (between @ second[expert].T).bfloat16().float()
        if heard["tp_rank"] == 0:
            result += out_of[expert]
        mine = chosen == expert + heard["ep_rank"] * first.shape[0]
        out += (heard["token_final_scales"] * mine).sum(dim=1, keepdim=True) * result
    return out.bfloat16()
