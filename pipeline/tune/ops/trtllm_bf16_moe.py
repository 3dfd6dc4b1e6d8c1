"""`trtllm_bf16_moe`: a MoE layer with bfloat16 weights through the trtllm-gen kernels, routed by router logits.

The weights lie as vLLM 0.28 and 0.33 (fused_moe/oracle/unquantized.py) and SGLang 0.5.23 (quantization/unquant.py) lay
them: rows shuffled, columns in blocks of 128 bytes first, the one layout that the op takes. The intermediate size must
be a multiple of 128. Compute capability 10.0 and 10.3: no GPU has run this adapter yet. Held against the signatures
and keys of FlashInfer 0.6.16.post3 and 0.7.4.

`trtllm_bf16_routed_moe` is tuned under the same name with other shapes, those of chosen experts in place of logits: no
entry of one answers the other.
"""

from __future__ import annotations

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import need_device

from .cuda import need_capability
from .trtllm_layer import UniformLayer
from .trtllm_moe import CAPABLE, block_major, layer, modules, output

__all__ = ["CUSTOM_OPS", "DEVICE", "make", "modules"]
CUSTOM_OPS = ("flashinfer::trtllm_bf16_moe",)
DEVICE = "cuda"


class Bf16Moe(UniformLayer):
    """One MoE layer of a plan on this rank."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed, torch.bfloat16)
        self._laid = tuple(block_major(weight) for weight in self._weights)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer import fused_moe
        from flashinfer.fused_moe import WeightLayout

        found = fused_moe.trtllm_bf16_moe(
            routing_logits=self._logits(tokens),
            routing_bias=None,
            hidden_states=self._activation(tokens),
            gemm1_weights=self._laid[0],
            gemm2_weights=self._laid[1],
            **layer(self._op, self._sizes),
            use_shuffled_weight=True,
            weight_layout=int(WeightLayout.BlockMajorK),
        )
        return output(found)


def make(op: OpPlan, device: torch.device, seed: int) -> Bf16Moe:
    """Prepare a layer; raise `OpNotHere`."""
    need_capability(op, need_device(device), CAPABLE)
    return Bf16Moe(op, device, seed)
