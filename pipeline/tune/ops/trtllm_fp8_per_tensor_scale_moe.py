"""`trtllm_fp8_per_tensor_scale_moe`: a MoE layer with one scale per expert and product, through trtllm-gen kernels.

The weights lie as vLLM 0.28 and 0.33 (quantization/utils/flashinfer_utils.py) and SGLang 0.5.23
(moe_runner/flashinfer_trtllm.py) lay them: rows interleaved and shuffled, columns as they come, the one layout that
the op takes. The input has one scale too, and so has what lies between the products. Compute capability 10.0 and 10.3:
no GPU has run this adapter yet. Held against the signatures and keys of FlashInfer 0.6.16.post3 and 0.7.4.
"""

from __future__ import annotations

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import need_device

from .cuda import need_capability
from .trtllm_layer import UniformLayer
from .trtllm_moe import CAPABLE, layer, modules, output

__all__ = ["CUSTOM_OPS", "DEVICE", "make", "modules"]
CUSTOM_OPS = ("flashinfer::trtllm_fp8_per_tensor_scale_moe",)
DEVICE = "cuda"

_BETWEEN = 0.25  # what the fp8 values between the products are times; they stay between 1 and the largest, 448


class Fp8TensorMoe(UniformLayer):
    """One MoE layer of a plan on this rank."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed, torch.float8_e4m3fn)
        self._laid = tuple(weight.contiguous() for weight in self._weights)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer import fused_moe

        first, second = (scale.flatten() for scale in self._scales)  # the input's own scale is 1
        found = fused_moe.trtllm_fp8_per_tensor_scale_moe(
            routing_logits=self._logits(tokens),
            routing_bias=None,
            hidden_states=self._activation(tokens),
            gemm1_weights=self._laid[0],
            output1_scales_scalar=first / _BETWEEN,
            output1_scales_gate_scalar=first,
            gemm2_weights=self._laid[1],
            output2_scales_scalar=second * _BETWEEN,
            use_routing_scales_on_input=False,
            **layer(self._op, self._sizes),
        )
        return output(found)


def make(op: OpPlan, device: torch.device, seed: int) -> Fp8TensorMoe:
    """Prepare a layer; raise `OpNotHere`."""
    need_capability(op, need_device(device), CAPABLE)
    return Fp8TensorMoe(op, device, seed)
