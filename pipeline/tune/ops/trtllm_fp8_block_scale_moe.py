"""`trtllm_fp8_block_scale_moe`: a MoE layer with block-scaled fp8 weights through the trtllm-gen kernels.

`fp8_block` (blocks of 128×128, float32 scales) or `mxfp8` (blocks of 32, e8m0 scales). The weights lie as vLLM 0.28 and
0.33 lay them (model_executor/layers/fused_moe/experts/trtllm_fp8_moe.py): rows shuffled, and of `fp8_block` columns in
blocks of 128 first. A tactic is one of that layout's, and the key holds the layout from FlashInfer 0.7.0 on alone. The
rows of an expert are alike here, so that no shuffle can be wrong. Compute capability 10.0 and 10.3: no GPU has run
this adapter yet. Held against the signatures of FlashInfer 0.6.16.post3 and 0.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import need_device, normal, seed_for

from .cuda import need_capability
from .fp4 import E8M0_ONE
from .moe import Scaled, logits, moe_excess, route, sizes
from .question import offered
from .trtllm_moe import CAPABLE, block_major, layer, modules, output

__all__ = ["CUSTOM_OPS", "DEVICE", "make", "modules"]
CUSTOM_OPS = ("flashinfer::trtllm_fp8_block_scale_moe",)
DEVICE = "cuda"


class Fp8BlockMoe:
    """One MoE layer of a plan on this rank: random fp8 weights, alike in every row, under constant scales."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        self._op, self._sizes, self._device = op, sizes(op), device
        s, self._seed = self._sizes, seed_for(seed, "trtllm_fp8_block_scale_moe", *sorted(op.shape.items()))
        self._mx = op.options.get("format") == "mxfp8"
        # Powers of two, which e8m0 can hold as well
        self._scales = tuple(2.0 ** -round(torch.tensor(float(n)).log2().item() / 2) for n in (s.hidden, s.inner))
        shapes = ((s.local, 2 * s.inner, s.hidden), (s.local, s.hidden, s.inner))
        self._weights = tuple(
            normal((local, 1, columns), torch.float8_e4m3fn, device, seed_for(self._seed, n)).expand(-1, rows, -1)
            for n, (local, rows, columns) in enumerate(shapes)
        )
        self._laid = tuple(w.contiguous() if self._mx else block_major(w) for w in self._weights)

    def _blocks(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        """Constant block scales of a weight, or of the activation."""
        if not self._mx:
            return torch.full(shape, scale, dtype=torch.float32, device=self._device)
        exponent = E8M0_ONE + round(torch.tensor(scale).log2().item())
        return torch.full(shape, exponent, dtype=torch.uint8, device=self._device)

    def _weight_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        s = self._sizes
        rows, columns = (1, 32) if self._mx else (128, 128)
        return (
            self._blocks((s.local, 2 * s.inner // rows, s.hidden // columns), self._scales[0]),
            self._blocks((s.local, s.hidden // rows, s.inner // columns), self._scales[1]),
        )

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal(
            (tokens, self._sizes.hidden), torch.float8_e4m3fn, self._device, seed_for(self._seed, "x", tokens)
        )

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer import fused_moe
        from flashinfer.fused_moe import WeightLayout
        from flashinfer.fused_moe.core import Fp8QuantizationType

        s = self._sizes
        chosen, _ = route(self._op, tokens, self._device, self._seed)
        first, second = self._weight_scales()
        shape = (tokens, s.hidden // 32) if self._mx else (s.hidden // 128, tokens)
        kind = Fp8QuantizationType.MxFp8 if self._mx else Fp8QuantizationType.DeepSeekFp8
        found = fused_moe.trtllm_fp8_block_scale_moe(
            routing_logits=logits(chosen, s.experts),
            routing_bias=None,
            hidden_states=self._activation(tokens),
            hidden_states_scale=self._blocks(shape, 1.0),
            gemm1_weights=self._laid[0],
            gemm1_weights_scale=first,
            gemm2_weights=self._laid[1],
            gemm2_weights_scale=second,
            **layer(self._op, s),
            use_shuffled_weight=True,
            weight_layout=int(WeightLayout.MajorK if self._mx else WeightLayout.BlockMajorK),
            fp8_quantization_type=kind,
        )
        return output(found)

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64; the logits give all chosen experts one weight."""
        s = self._sizes
        chosen, share = route(self._op, tokens, self._device, self._seed)
        up, down = (Scaled(w, scale) for w, scale in zip(self._weights, self._scales, strict=True))
        equal = torch.full_like(share, 1 / s.top_k)
        return moe_excess(out, self._activation(tokens).float(), (chosen, equal), (up, down), (s.first, 2.0**-4))

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What the runner offers."""
        return offered(self, tokens)


def make(op: OpPlan, device: torch.device, seed: int) -> Fp8BlockMoe:
    """Prepare a layer; raise `OpNotHere`."""
    return Fp8BlockMoe(op, device, seed)
