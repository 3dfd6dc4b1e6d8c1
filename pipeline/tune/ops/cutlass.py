"""`cutlass_fused_moe`: a MoE layer through CUTLASS; two questions to the AutoTuner, one for each product.

bfloat16 or float16, fp8 with one scale per tensor, or mxfp4 weights with bfloat16 activations. On compute capability
9.0 its module has 182 sources and takes an hour and a half to compile; no GPU has run this op yet.

Up to FlashInfer 0.6.17 the key holds shapes alone: two layers that differ in dtype, top_k or how they are divided
would overwrite each other's entries, so that only one may be in a cache. Profiling of fp8 block scales measures nothing
in any version to 0.7.4: refused.

mxfp4: as vLLM 0.28 and 0.33 (fused_moe/oracle/mxfp4.py, experts/flashinfer_cutlass_moe.py) and SGLang 0.5.23
(srt/layers/quantization/mxfp4.py) ask for gpt-oss: up before gate, weights and scales interleaved by FlashInfer's own
helpers, which lay the scales otherwise in 0.7.2.post1 than in 0.6.16.post3; biases in bfloat16, whose shapes are in the
key; alpha, beta and limit of the activation per expert. Profiling runs the kernels. FlashInfer 0.6.16.post3 offers
tactics whatever the sizes are, 0.7.4 leaves out those whose tiles it knows not to fit: what does not fit is found when
a choice is verified.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api

from . import Case, OpSpec
from .cuda import OpNotHere, capability, nan, need_capability
from .fp4 import bits, values
from .moe import Gated, Scaled, moe_excess, route, sizes
from .reference import dtype_of, normal, seed_for, unit_roundoff

MULTIPLE = 128  # of the sizes: 128 values of four scales are interleaved
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0  # of gpt-oss's SwiGLU, as both servers set them
_BLOCK = 32
_E8M0_BIAS = 127


class Mxfp4:
    """One weight of a layer, `[experts, rows, columns]`, of which an expert's values are drawn when they are asked for.

    So only what the kernels read stays in memory. Scales are three neighbouring powers of two, about columns^-0.5.
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device, seed: int) -> None:
        self._shape, self._device, self._seed = shape, device, seed
        self._exponent = _E8M0_BIAS + round(math.log2(shape[2] ** -0.5)) - 1

    def __len__(self) -> int:
        return self._shape[0]

    def bits(self, expert: int) -> torch.Tensor:
        """`[rows, columns / 2]`, two values to a byte."""
        return bits((self._shape[1], self._shape[2] // 2), self._device, seed_for(self._seed, "bits", expert))

    def scales(self, expert: int) -> torch.Tensor:
        """`[rows, columns / 32]` in E8M0."""
        generator = torch.Generator(self._device).manual_seed(seed_for(self._seed, "scales", expert))
        shape = (self._shape[1], self._shape[2] // _BLOCK)
        drawn = torch.randint(0, 3, shape, generator=generator, device=self._device)
        return (drawn + self._exponent).to(torch.uint8)

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        """The values of one expert, `[rows, columns]` in float32: exact, as scales are powers of two."""
        scales = torch.exp2(self.scales(expert).float() - _E8M0_BIAS)
        return values(self.bits(expert)) * scales.repeat_interleave(_BLOCK, dim=1)

    def laid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and scales as the kernels read them."""
        from flashinfer import fused_moe

        packed = torch.stack([self.bits(expert) for expert in range(len(self))])
        scales = torch.stack([self.scales(expert) for expert in range(len(self))])
        return (
            fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed, "fp4"),
            fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales, _BLOCK),
        )


class CutlassMxfp4Moe:
    """One MoE layer of a plan on this rank."""

    bucket_only = True  # one workspace for all that its runner was prepared for

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        self._op, self._sizes, self._device = op, sizes(op), device
        s, self._seed = self._sizes, seed_for(seed, "cutlass_mxfp4_moe", *sorted(op.shape.items()))
        if (op.dtypes["a"], op.dtypes["out"]) != ("bfloat16", "bfloat16"):
            raise OpNotHere(f"{op.name}: mxfp4 weights take bfloat16 activations", hint="make the plan again")
        if op.options.get("activation") != "swiglu_oai" or op.options.get("bias") != "true":
            raise OpNotHere(f"{op.name}: mxfp4 experts are tuned as gpt-oss has them", hint="make the plan again")
        if s.hidden % MULTIPLE or s.inner % MULTIPLE:
            raise OpNotHere(
                f"{op.name}: mxfp4 takes sizes in multiples of {MULTIPLE}, these are {s.hidden} and {s.inner}",
                hint="make the plan again",
            )
        self._experts = (
            Mxfp4((s.local, 2 * s.inner, s.hidden), device, seed_for(self._seed, "up")),
            Mxfp4((s.local, s.hidden, s.inner), device, seed_for(self._seed, "down")),
        )
        self._weights, self._scales = zip(*(expert.laid() for expert in self._experts), strict=True)
        self._biases = tuple(
            normal((s.local, size), torch.bfloat16, device, seed_for(self._seed, "bias", size, n))
            for n, size in enumerate((2 * s.inner, s.hidden))
        )

    def _activation(self, tokens: int) -> torch.Tensor:
        return normal((tokens, self._sizes.hidden), torch.bfloat16, self._device, seed_for(self._seed, "x", tokens))

    def _each(self, value: float) -> torch.Tensor:
        return torch.full((self._sizes.local,), value, dtype=torch.float32, device=self._device)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer.fused_moe import cutlass_fused_moe

        s, out = self._sizes, nan((tokens, self._sizes.hidden), torch.bfloat16, self._device)
        chosen, share = route(self._op, tokens, self._device, self._seed)
        cutlass_fused_moe(
            self._activation(tokens), chosen, share, *self._weights, torch.bfloat16, list(self._scales), *self._biases,
            swiglu_alpha=self._each(ALPHA), swiglu_beta=self._each(BETA), swiglu_limit=self._each(LIMIT),
            tp_size=s.tp, tp_rank=s.tp_rank, ep_size=s.ep, ep_rank=s.ep_rank, output=out, use_w4_group_scaling=True,
            tune_max_num_tokens=self._op.buckets[-1],
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64. Of the ranks that divide an expert the first adds the last bias."""
        up, down = self._biases
        rounding = unit_roundoff(torch.bfloat16)
        biases = (up, down if self._sizes.tp_rank == 0 else None)
        gated = Gated(ALPHA, BETA, LIMIT, biases, stored=rounding, independent=True)
        routed = route(self._op, tokens, self._device, self._seed)
        place = (self._sizes.first, rounding)
        return moe_excess(out, self._activation(tokens).float(), routed, self._experts, place, gated=gated)


class CutlassMoe:
    """One MoE layer of a plan on this rank."""

    bucket_only = True  # one workspace for all that its runner was prepared for

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
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


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, scale: float) -> torch.Tensor:
    drawn = normal(shape, dtype, device, seed)
    return drawn if scale == 1.0 else drawn * scale


def _build(op: OpPlan, device: torch.device, seed: int) -> Case:
    if op.options.get("format") != "mxfp4":
        return CutlassMoe(op, device, seed)
    need_capability(op, device, (90,))
    return CutlassMxfp4Moe(op, device, seed)


def _modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - all dtypes are one module
    """The JIT module for this GPU."""
    family = {89: 89, 90: 90, 100: 100, 103: 103}.get(capability(torch.device("cuda")), 120)
    return [flashinfer_api.jit_spec("flashinfer.jit.fused_moe", f"gen_cutlass_fused_moe_sm{family}_module", False)]


SPECS = {
    "cutlass_fused_moe": OpSpec(
        ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"),
        _build,
        _modules,
        capable=(89, 90, 100, 103, 110, 120, 121),
    )
}
