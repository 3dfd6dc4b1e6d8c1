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
a choice is checked.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api

from . import Case, OpNotHere, OpSpec, capability, need_capability
from .moe import SWIGLU, Gated, MoeLayer, Scaled, moe_excess
from .reference import bits, dtype_of, nan, normal, seed_for, unit_roundoff, values

MULTIPLE = 128  # of the sizes: 128 values of four scales are interleaved
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0  # of gpt-oss's SwiGLU, as both servers set them
_BLOCK = 32
_E8M0_BIAS = 127


class CutlassMoe(MoeLayer):
    """A layer in bfloat16, float16 or fp8."""

    bucket_only = True  # one workspace for all that its runner was prepared for
    gated = SWIGLU

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed)
        self.dtype = dtype_of(op.dtypes["a"], ["bfloat16", "float16", "float8_e4m3fn"])
        self.out = dtype_of(op.dtypes["out"], ["bfloat16", "float16"])
        self.between = 2.0**-4 if self.dtype == torch.float8_e4m3fn else unit_roundoff(self.dtype)
        self.arguments = self.draw()

    def draw(self) -> dict[str, Any]:
        """Set `weights` and `laid`; return the arguments of a call that do not depend on its tokens."""
        s, one = self.sizes, self.each(1.0)
        up, down = (normal(shape, self.dtype, self.device, seed_for(self.seed, n)) for n, shape in enumerate(s.shapes))
        scales = (self.each(s.hidden**-0.5), self.each(s.inner**-0.5))
        if self.dtype != torch.float8_e4m3fn:
            self.laid = (up * s.hidden**-0.5, down * s.inner**-0.5)
            self.weights = (Scaled(self.laid[0], one), Scaled(self.laid[1], one))
            return {"quant_scales": None}
        self.laid, self.weights = (up, down), (Scaled(up, scales[0]), Scaled(down, scales[1]))
        # Dequantization of the first product per expert, quantization in between, of the second, of the input
        return {"quant_scales": [scales[0], one[0], scales[1], one[0]]}

    def activation(self, tokens: int) -> torch.Tensor:
        """`[tokens, hidden]`."""
        return normal((tokens, self.sizes.hidden), self.dtype, self.device, seed_for(self.seed, "x", tokens))

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer.fused_moe import cutlass_fused_moe

        s, out = self.sizes, nan((tokens, self.sizes.hidden), self.out, self.device)
        chosen, share = self.routed(tokens)
        cutlass_fused_moe(
            self.activation(tokens), chosen, share, *self.laid, self.out, **self.arguments,
            tp_size=s.tp, tp_rank=s.tp_rank, ep_size=s.ep, ep_rank=s.ep_rank, output=out,
            tune_max_num_tokens=self.op.buckets[-1],
        )  # fmt: skip
        return out

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64."""
        place, x = (self.sizes.first, self.between), self.activation(tokens).float()
        return moe_excess(out, x, self.routed(tokens), self.weights, place, gated=self.gated)


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


class CutlassMxfp4Moe(CutlassMoe):
    """A layer with mxfp4 weights, as gpt-oss has them."""

    def draw(self) -> dict[str, Any]:
        """Set `weights` and `laid`; return the arguments of a call that do not depend on its tokens."""
        s, op = self.sizes, self.op
        if (self.dtype, self.out) != (torch.bfloat16, torch.bfloat16):
            raise OpNotHere(f"{op.name}: mxfp4 weights take bfloat16 activations", hint="make the plan again")
        if op.options.get("activation") != "swiglu_oai" or op.options.get("bias") != "true":
            raise OpNotHere(f"{op.name}: mxfp4 experts are tuned as gpt-oss has them", hint="make the plan again")
        if s.hidden % MULTIPLE or s.inner % MULTIPLE:
            raise OpNotHere(
                f"{op.name}: mxfp4 takes sizes in multiples of {MULTIPLE}, these are {s.hidden} and {s.inner}",
                hint="make the plan again",
            )
        up, down = (Mxfp4(shape, self.device, seed_for(self.seed, n)) for n, shape in enumerate(s.shapes))
        biases = [
            normal((s.local, size), torch.bfloat16, self.device, seed_for(self.seed, "bias", size, n))
            for n, size in enumerate((2 * s.inner, s.hidden))
        ]
        self.weights = (up, down)
        first, second = up.laid(), down.laid()
        self.laid = (first[0], second[0])
        # Of the ranks that divide an expert the first adds the last bias
        added = (biases[0], biases[1] if s.tp_rank == 0 else None)
        self.gated = Gated(ALPHA, BETA, LIMIT, added, stored=self.between, independent=True)
        return {
            "quant_scales": [first[1], second[1]],
            "fc1_expert_biases": biases[0],
            "fc2_expert_biases": biases[1],
            "swiglu_alpha": self.each(ALPHA),
            "swiglu_beta": self.each(BETA),
            "swiglu_limit": self.each(LIMIT),
            "use_w4_group_scaling": True,
        }


def _build(op: OpPlan, device: torch.device, seed: int) -> Case:
    kind = op.options.get("format")
    if kind == "mxfp4":
        need_capability(op, device, (90,))
        return CutlassMxfp4Moe(op, device, seed)
    if kind:
        raise OpNotHere(f"{op.name}: profiling block scales measures nothing", hint="leave the op out of the plan")
    return CutlassMoe(op, device, seed)


def _modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - all dtypes are one module
    """The JIT module for this GPU."""
    family = {89: 89, 90: 90, 100: 100, 103: 103}.get(capability(torch.device("cuda")), 120)
    return [flashinfer_api.jit_spec("flashinfer.jit.fused_moe", f"gen_cutlass_fused_moe_sm{family}_module", False)]


SPECS = {"cutlass_fused_moe": OpSpec(_build, _modules, capable=(89, 90, 100, 103, 110, 120, 121))}
