"""`cutlass_fused_moe`: a MoE layer through CUTLASS; two questions to the AutoTuner, one for each product.

bfloat16 or float16, fp8 with one scale per tensor, or mxfp4 weights (cutlass_mxfp4_moe.py). On compute capability 9.0
its module has 182 sources and takes an hour and a half to compile; no GPU has run this adapter yet.

Up to FlashInfer 0.6.17 the key holds shapes alone: two layers that differ in dtype, top_k or how they are divided
would overwrite each other's entries, so that only one may be in a cache (flashinfer/moe_keys.py). Profiling of fp8
block scales measures nothing in any version to 0.7.4: refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import dtype_of, need_device, normal, seed_for, unit_roundoff

from . import cutlass_mxfp4_moe
from .cuda import OpNotHere, capability, nan, need_capability, spec
from .moe import Scaled, moe_excess, route, sizes
from .question import offered

CUSTOM_OPS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
DEVICE = "cuda"
CAPABLE = (89, 90, 100, 103, 110, 120, 121)

_MODULE = "flashinfer.jit.fused_moe"


def modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - all dtypes are one module
    """The JIT module for this GPU."""
    family = {89: 89, 90: 90, 100: 100, 103: 103}.get(capability(torch.device("cuda")), 120)
    return [spec(_MODULE, f"gen_cutlass_fused_moe_sm{family}_module", False)]


class CutlassMoe:
    """One MoE layer of a plan on this rank."""

    bucket_only = True  # one workspace for all that its runner was prepared for

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        need_device(device)
        need_capability(op, device, CAPABLE)
        if op.options.get("format"):
            raise OpNotHere(f"{op.name}: profiling block scales measures nothing", hint="leave the op out of the plan")
        self._op, self._sizes, self._device = op, sizes(op), device
        self._dtype = dtype_of(op.dtypes["a"], ["bfloat16", "float16", "float8_e4m3fn"])
        self._out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self._fp8 = self._dtype == torch.float8_e4m3fn
        s, self._seed = self._sizes, seed_for(seed, "cutlass_fused_moe", *sorted(op.shape.items()))
        self._scales = (s.hidden**-0.5, s.inner**-0.5)  # what the stored values of the two weights are times
        self._weights = tuple(
            _drawn(shape, self._dtype, device, seed_for(self._seed, n), 1.0 if self._fp8 else scale)
            for n, (shape, scale) in enumerate(
                zip(((s.local, 2 * s.inner, s.hidden), (s.local, s.hidden, s.inner)), self._scales, strict=True)
            )
        )

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal((tokens, self._sizes.hidden), self._dtype, self._device, seed_for(self._seed, "x", tokens))

    def _quantization(self) -> list[torch.Tensor] | None:
        """Dequantization of the first product per expert, quantization in between, of the second, of the input."""
        if not self._fp8:
            return None
        ones = torch.ones(self._sizes.local, dtype=torch.float32, device=self._device)
        one = torch.ones((), dtype=torch.float32, device=self._device)
        return [ones * self._scales[0], one, ones * self._scales[1], one]

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer.fused_moe import cutlass_fused_moe

        s, out = self._sizes, nan((tokens, self._sizes.hidden), self._out, self._device)
        chosen, share = route(self._op, tokens, self._device, self._seed)
        cutlass_fused_moe(
            self._activation(tokens), chosen, share, *self._weights, self._out, self._quantization(),
            tp_size=s.tp, tp_rank=s.tp_rank, ep_size=s.ep, ep_rank=s.ep_rank, output=out,
            tune_max_num_tokens=self._op.buckets[-1],
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64."""
        scales = self._scales if self._fp8 else (1.0, 1.0)
        up, down = (Scaled(w, scale) for w, scale in zip(self._weights, scales, strict=True))
        between = 2.0**-4 if self._fp8 else unit_roundoff(self._dtype)
        routed = route(self._op, tokens, self._device, self._seed)
        return moe_excess(out, self._activation(tokens).float(), routed, (up, down), (self._sizes.first, between))

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What the runner offers."""
        return offered(self, tokens)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, scale: float) -> torch.Tensor:
    drawn = normal(shape, dtype, device, seed)
    return drawn if scale == 1.0 else drawn * scale


def make(op: OpPlan, device: torch.device, seed: int) -> CutlassMoe | cutlass_mxfp4_moe.CutlassMxfp4Moe:
    """Prepare a layer; raise `OpNotHere` or `DtypeUnknown`."""
    if op.options.get("format") != "mxfp4":
        return CutlassMoe(op, device, seed)
    need_device(device)
    need_capability(op, device, cutlass_mxfp4_moe.CAPABLE)
    return cutlass_mxfp4_moe.CutlassMxfp4Moe(op, device, seed)
