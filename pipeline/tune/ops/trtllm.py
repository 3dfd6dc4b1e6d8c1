"""MoE layers through the trtllm-gen kernels, on compute capability 10.0 and 10.3.

No GPU has run them for this project yet; held against the signatures and keys of FlashInfer 0.6.16.post3 and 0.7.4.

    trtllm_bf16_moe                    bfloat16 weights, columns in blocks of 128 bytes first, the one layout it takes;
                                       `trtllm_bf16_routed_moe` is tuned under the same name with other shapes
    trtllm_fp8_per_tensor_scale_moe    one scale per expert and product; columns as they come
    trtllm_fp8_block_scale_moe         `fp8_block` (128×128, float32 scales, columns in blocks of 128 first) or `mxfp8`
                                       (32, e8m0); a tactic belongs to a layout, which is in the key from 0.7.0 on
    trtllm_fp4_block_scale_moe         `nvfp4` (four-bit activations, blocks of 16) or `mxfp4` (bfloat16 activations,
                                       blocks of 32); `hidden_out`: a caller takes fewer columns than the padded ones

Weights lie as vLLM 0.28 and 0.33 and SGLang 0.5.23 lay them. The kernels want their rows shuffled: the rows of an
expert are alike here, so that no shuffle can be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api

from . import Case, OpSpec
from .cuda import nan
from .fp4 import E4M3_ONE, E8M0_ONE, VALUES, bits, values
from .moe import Scaled, Sizes, logits, moe_excess, route, sizes
from .reference import normal, seed_for, unit_roundoff

# FlashInfer's RoutingMethodType by the plan's words
_ROUTING = {"default": "Default", "renormalize": "Renormalize", "renormalize_naive": "RenormalizeNaive",
            "deepseek_v3": "DeepSeekV3"}  # fmt: skip
_BETWEEN = 0.25  # what the fp8 values between the products are times; they stay between 1 and the largest, 448


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


class UniformLayer(ABC):
    """One MoE layer of a plan on this rank, in bfloat16 or in fp8 with one scale per expert and product.

    `_weights` are `[local, rows, columns]`, `_scales` what their values are times, `[local, 1, 1]` in float32; all
    ones for bfloat16.
    """

    def __init__(self, op: OpPlan, device: torch.device, seed: int, dtype: torch.dtype) -> None:
        self._op, self._sizes, self._device, self._dtype = op, sizes(op), device, dtype
        s, self._seed = self._sizes, seed_for(seed, op.op, *sorted(op.shape.items()))
        factor = 1 + torch.arange(s.local, device=device)[:, None, None] % 3 / 2  # 1, 1.5 or 2 by expert
        scales = (factor * (4 / s.hidden), torch.full_like(factor, 1 / s.inner))
        drawn = [
            normal((s.local, 1, columns), torch.float32, device, seed_for(self._seed, n)).abs()
            for n, columns in enumerate((s.hidden, s.inner))
        ]
        if dtype == torch.bfloat16:
            drawn = [one * scale for one, scale in zip(drawn, scales, strict=True)]
            scales = (torch.ones_like(factor), torch.ones_like(factor))
        self._scales = scales
        up, down = (one.to(dtype) for one in drawn)
        self._weights = (up.expand(-1, 2 * s.inner, -1), down.expand(-1, s.hidden, -1))

    def _activation(self, tokens: int) -> torch.Tensor:
        x = normal((tokens, self._sizes.hidden), torch.float32, self._device, seed_for(self._seed, "x", tokens)).abs()
        return (x * 0.5 ** (torch.arange(tokens, device=self._device)[:, None] % 3)).to(self._dtype)

    def _logits(self, tokens: int) -> torch.Tensor:
        """Router logits in the dtype of servers: float32 where sigmoids are biased and compared, else bfloat16."""
        found = logits(route(self._op, tokens, self._device, self._seed)[0], self._sizes.experts)
        return found if self._op.options["routing_method"] == "deepseek_v3" else found.bfloat16()

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64; the logits give all chosen experts one weight."""
        s, between = self._sizes, unit_roundoff(self._dtype)
        chosen, share = route(self._op, tokens, self._device, self._seed)
        up, down = (
            (w[:, :1].float() * scale).expand(-1, w.shape[1], -1)
            for w, scale in zip(self._weights, self._scales, strict=True)
        )
        equal = torch.full_like(share, 1 / s.top_k)
        return moe_excess(out, self._activation(tokens).float(), (chosen, equal), (up, down), (s.first, between))

    @abstractmethod
    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""


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


class Fp8BlockMoe:
    """One MoE layer of a plan on this rank: random fp8 weights, alike in every row, under constant scales."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
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


class Fp4BlockMoe:
    """One MoE layer of a plan on this rank."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
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


def _modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - one module for all
    """The JIT module that loads the trtllm-gen kernels."""
    return [flashinfer_api.jit_spec("flashinfer.jit.fused_moe", "gen_trtllm_gen_fused_moe_sm100_module")]


_LAYERS: Mapping[str, Callable[[OpPlan, torch.device, int], Case]] = {
    "trtllm_bf16_moe": Bf16Moe,
    "trtllm_fp8_per_tensor_scale_moe": Fp8TensorMoe,
    "trtllm_fp8_block_scale_moe": Fp8BlockMoe,
    "trtllm_fp4_block_scale_moe": Fp4BlockMoe,
}
SPECS = {name: OpSpec((f"flashinfer::{name}",), build, _modules, capable=(100, 103)) for name, build in _LAYERS.items()}
