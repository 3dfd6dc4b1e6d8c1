"""`trtllm_fp4_block_scale_moe`: a MoE layer with four-bit weights through the trtllm-gen kernels.

`nvfp4` (four-bit activations, blocks of 16) or `mxfp4` (bfloat16 activations, blocks of 32). The kernels want the
weights' rows shuffled; here all elements of an expert are one value, so that no shuffle can be wrong. The option
`hidden_out` says that a caller takes fewer columns than the padded ones: the output's shape is in the key. Compute
capability 10.0 and 10.3: no GPU has run this adapter yet. Held against the signatures of FlashInfer 0.6.16.post3 and
0.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import need_device, normal, seed_for

from .cuda import nan, need_capability
from .fp4 import E4M3_ONE, E8M0_ONE, VALUES, bits, values
from .moe import logits, moe_excess, route, sizes
from .question import offered
from .trtllm_moe import CAPABLE, layer, modules, output

__all__ = ["CUSTOM_OPS", "DEVICE", "make", "modules"]
CUSTOM_OPS = ("flashinfer::trtllm_fp4_block_scale_moe",)
DEVICE = "cuda"


class Fp4BlockMoe:
    """One MoE layer of a plan on this rank."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        self._op, self._sizes, self._device = op, sizes(op), device
        s, self._seed = self._sizes, seed_for(seed, "trtllm_fp4_block_scale_moe", *sorted(op.shape.items()))
        self._mx = op.options.get("format") == "mxfp4"
        self._block = 32 if self._mx else 16
        self._columns = int(op.options.get("hidden_out", s.hidden))
        self._codes = torch.arange(s.local, device=device) % 3 + 1  # 0.5, 1 or 1.5 by expert
        self._scales = (1 / s.hidden, 1 / s.inner)
        self._weights = (self._constant(2 * s.inner, s.hidden // 2), self._constant(s.hidden, s.inner // 2))

    def _constant(self, rows: int, columns: int) -> torch.Tensor:
        byte = (self._codes * 17).to(torch.uint8)[:, None, None]
        return byte.expand(-1, rows, columns).contiguous()

    def _ones(self, *shape: int) -> torch.Tensor:
        if self._mx:
            return torch.full(shape, E8M0_ONE, dtype=torch.uint8, device=self._device)
        return torch.full(shape, E4M3_ONE, dtype=torch.uint8, device=self._device).view(torch.float8_e4m3fn)

    def _activation(self, tokens: int) -> torch.Tensor:
        seed = seed_for(self._seed, "x", tokens)
        if self._mx:
            return normal((tokens, self._sizes.hidden), torch.bfloat16, self._device, seed)
        return bits((tokens, self._sizes.hidden // 2), self._device, seed)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer import fused_moe

        s, b = self._sizes, self._block
        chosen, _ = route(self._op, tokens, self._device, self._seed)
        each = torch.ones(s.local, dtype=torch.float32, device=self._device)
        found = fused_moe.trtllm_fp4_block_scale_moe(
            routing_logits=logits(chosen, s.experts).bfloat16(),
            routing_bias=None,
            hidden_states=self._activation(tokens),
            hidden_states_scale=None if self._mx else self._ones(tokens, s.hidden // b),
            gemm1_weights=self._weights[0],
            gemm1_weights_scale=self._ones(s.local, 2 * s.inner, s.hidden // b).view(torch.float8_e4m3fn),
            gemm1_bias=None,
            gemm1_alpha=None,
            gemm1_beta=None,
            gemm1_clamp_limit=None,
            gemm2_weights=self._weights[1],
            gemm2_weights_scale=self._ones(s.local, s.hidden, s.inner // b).view(torch.float8_e4m3fn),
            gemm2_bias=None,
            output1_scale_scalar=each * self._scales[0],
            output1_scale_gate_scalar=each * self._scales[0],
            output2_scale_scalar=each * self._scales[1],
            output=nan((tokens, self._columns), torch.bfloat16, self._device),
            **layer(self._op, s),
        )
        return output(found)

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64; the logits give all chosen experts one weight."""
        s, table = self._sizes, torch.tensor(VALUES, device=self._device)
        chosen, share = route(self._op, tokens, self._device, self._seed)
        each = table[self._codes][:, None, None]
        up = (each * self._scales[0]).expand(-1, 2 * s.inner, s.hidden)
        down = (each * self._scales[1]).expand(-1, self._columns, s.inner)
        x = self._activation(tokens).float() if self._mx else values(self._activation(tokens))
        between = 2.0**-8 if self._mx else 2.0**-2
        return moe_excess(out, x, (chosen, torch.full_like(share, 1 / s.top_k)), (up, down), (s.first, between))

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What the runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Fp4BlockMoe:
    """Prepare a layer; raise `OpNotHere`."""
    return Fp4BlockMoe(op, device, seed)
