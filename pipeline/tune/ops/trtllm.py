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

import math
from abc import abstractmethod
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api

from . import OpSpec
from .moe import MoeLayer, Scaled, Sizes, moe_excess
from .reference import E4M3_ONE, E8M0_ONE, bits, nan, normal, seed_for, unit_roundoff, values

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


class TrtllmMoe(MoeLayer):
    """One layer. `router` is the dtype of the logits, `between` the unit roundoff of what lies between the products."""

    router = torch.bfloat16
    between: float

    @abstractmethod
    def arguments(self, tokens: int) -> dict[str, Any]:
        """The arguments that this op alone takes."""

    def row(self, columns: int, dtype: torch.dtype, what: object) -> torch.Tensor:
        """A row for each expert, `[local, 1, columns]`, standard normal: all rows of a weight are copies of it."""
        return normal((self.sizes.local, 1, columns), dtype, self.device, seed_for(self.seed, what))

    def values(self, tokens: int) -> torch.Tensor:
        """The activation in float32."""
        return self.activation(tokens).float()

    def logits(self, tokens: int) -> torch.Tensor:
        """Router logits that any routing method turns into the chosen experts with equal weights."""
        chosen, _ = self.routed(tokens)
        found = torch.full((tokens, self.sizes.experts), -8.0, device=self.device)
        return found.scatter_(1, chosen.long(), 8.0).to(self.router)

    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
        from flashinfer import fused_moe

        found: torch.Tensor | list[torch.Tensor] = getattr(fused_moe, self.op.op)(
            routing_logits=self.logits(tokens),
            routing_bias=None,
            hidden_states=self.activation(tokens),
            gemm1_weights=self.laid[0],
            gemm2_weights=self.laid[1],
            **layer(self.op, self.sizes),
            **self.arguments(tokens),
        )
        return found[0] if isinstance(found, list) else found

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64; the logits give all chosen experts one weight."""
        chosen, share = self.routed(tokens)
        equal = torch.full_like(share, 1 / self.sizes.top_k)
        return moe_excess(out, self.values(tokens), (chosen, equal), self.weights, (self.sizes.first, self.between))


class PlainMoe(TrtllmMoe):
    """A layer without block scales: in bfloat16, or in fp8 with one scale per expert and product."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed)
        s, self.fp8 = self.sizes, op.op == "trtllm_fp8_per_tensor_scale_moe"
        self.dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.between = unit_roundoff(self.dtype)
        if op.options["routing_method"] == "deepseek_v3":
            self.router = torch.float32  # where sigmoids are biased and compared, as servers have it
        factor = 1 + torch.arange(s.local, device=device) % 3 / 2  # 1, 1.5 or 2 by expert
        self.scales = (factor * (4 / s.hidden), self.each(1 / s.inner))
        up, down = (self.row(columns, torch.float32, n).abs() for n, columns in enumerate((s.hidden, s.inner)))
        if not self.fp8:
            up, down = up * self.scales[0][:, None, None], down * self.scales[1][:, None, None]
            self.scales = (self.each(1.0), self.each(1.0))
        first = up.to(self.dtype).expand(-1, 2 * s.inner, -1)
        second = down.to(self.dtype).expand(-1, s.hidden, -1)
        self.weights = (Scaled(first, self.scales[0]), Scaled(second, self.scales[1]))
        lay = torch.Tensor.contiguous if self.fp8 else block_major
        self.laid = (lay(first), lay(second))

    def activation(self, tokens: int) -> torch.Tensor:
        """Positive values, of three sizes by token."""
        x = normal((tokens, self.sizes.hidden), torch.float32, self.device, seed_for(self.seed, "x", tokens)).abs()
        return (x * 0.5 ** (torch.arange(tokens, device=self.device)[:, None] % 3)).to(self.dtype)

    def arguments(self, tokens: int) -> dict[str, Any]:  # noqa: ARG002
        """Scales, or the layout."""
        from flashinfer.fused_moe import WeightLayout

        if not self.fp8:
            return {"use_shuffled_weight": True, "weight_layout": int(WeightLayout.BlockMajorK)}
        first, second = self.scales  # the input's own scale is 1
        return {
            "output1_scales_scalar": first / _BETWEEN,
            "output1_scales_gate_scalar": first,
            "output2_scales_scalar": second * _BETWEEN,
            "use_routing_scales_on_input": False,
        }


class Fp8BlockMoe(TrtllmMoe):
    """Random fp8 weights under constant scales of blocks: powers of two, which e8m0 can express as well."""

    router = torch.float32
    between = 2.0**-4

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed)
        s, self.mx = self.sizes, op.options.get("format") == "mxfp8"
        self.scales = (2.0 ** -round(math.log2(s.hidden) / 2), 2.0 ** -round(math.log2(s.inner) / 2))
        first = self.row(s.hidden, torch.float8_e4m3fn, 0).expand(-1, 2 * s.inner, -1)
        second = self.row(s.inner, torch.float8_e4m3fn, 1).expand(-1, s.hidden, -1)
        self.weights = (Scaled(first, self.each(self.scales[0])), Scaled(second, self.each(self.scales[1])))
        lay = torch.Tensor.contiguous if self.mx else block_major
        self.laid = (lay(first), lay(second))

    def activation(self, tokens: int) -> torch.Tensor:
        """Random fp8 values."""
        shape, seed = (tokens, self.sizes.hidden), seed_for(self.seed, "x", tokens)
        return normal(shape, torch.float8_e4m3fn, self.device, seed)

    def _blocks(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        """Constant block scales of a weight, or of the activation."""
        if not self.mx:
            return torch.full(shape, scale, dtype=torch.float32, device=self.device)
        return torch.full(shape, E8M0_ONE + round(math.log2(scale)), dtype=torch.uint8, device=self.device)

    def arguments(self, tokens: int) -> dict[str, Any]:
        """Block scales and the layout."""
        from flashinfer.fused_moe import WeightLayout
        from flashinfer.fused_moe.core import Fp8QuantizationType

        s = self.sizes
        rows, columns = (1, 32) if self.mx else (128, 128)
        return {
            "hidden_states_scale": self._blocks(
                (tokens, s.hidden // 32) if self.mx else (s.hidden // 128, tokens), 1.0
            ),
            "gemm1_weights_scale": self._blocks((s.local, 2 * s.inner // rows, s.hidden // columns), self.scales[0]),
            "gemm2_weights_scale": self._blocks((s.local, s.hidden // rows, s.inner // columns), self.scales[1]),
            "use_shuffled_weight": True,
            "weight_layout": int(WeightLayout.MajorK if self.mx else WeightLayout.BlockMajorK),
            "fp8_quantization_type": Fp8QuantizationType.MxFp8 if self.mx else Fp8QuantizationType.DeepSeekFp8,
        }


class Fp4BlockMoe(TrtllmMoe):
    """Weights of one value per expert under block scales of one."""

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        super().__init__(op, device, seed)
        s, self.mx = self.sizes, op.options.get("format") == "mxfp4"
        self.block = 32 if self.mx else 16
        self.between = 2.0**-8 if self.mx else 2.0**-2
        self.columns = int(op.options.get("hidden_out", s.hidden))
        self.scales = (1 / s.hidden, 1 / s.inner)
        code = (torch.arange(s.local, device=device) % 3 + 1)[:, None, None]  # 0.5, 1 or 1.5 by expert
        byte = (code * 17).to(torch.uint8)
        self.laid = (
            byte.expand(-1, 2 * s.inner, s.hidden // 2).contiguous(),
            byte.expand(-1, s.hidden, s.inner // 2).contiguous(),
        )
        self.weights = (
            Scaled((code / 2).expand(-1, 2 * s.inner, s.hidden), self.each(self.scales[0])),
            Scaled((code / 2).expand(-1, self.columns, s.inner), self.each(self.scales[1])),
        )

    def activation(self, tokens: int) -> torch.Tensor:
        """bfloat16 beside mxfp4 weights, four-bit values beside nvfp4."""
        seed = seed_for(self.seed, "x", tokens)
        if self.mx:
            return normal((tokens, self.sizes.hidden), torch.bfloat16, self.device, seed)
        return bits((tokens, self.sizes.hidden // 2), self.device, seed)

    def values(self, tokens: int) -> torch.Tensor:
        """The activation in float32."""
        return self.activation(tokens).float() if self.mx else values(self.activation(tokens))

    def _ones(self, *shape: int) -> torch.Tensor:
        one = E8M0_ONE if self.mx else E4M3_ONE
        return torch.full(shape, one, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)

    def arguments(self, tokens: int) -> dict[str, Any]:
        """Scales, and none of what gpt-oss adds to a layer."""
        s, b = self.sizes, self.block
        return {
            "hidden_states_scale": None if self.mx else self._ones(tokens, s.hidden // b),
            "gemm1_weights_scale": self._ones(s.local, 2 * s.inner, s.hidden // b),
            "gemm1_bias": None,
            "gemm1_alpha": None,
            "gemm1_beta": None,
            "gemm1_clamp_limit": None,
            "gemm2_weights_scale": self._ones(s.local, s.hidden, s.inner // b),
            "gemm2_bias": None,
            "output1_scale_scalar": self.each(self.scales[0]),
            "output1_scale_gate_scalar": self.each(self.scales[0]),
            "output2_scale_scalar": self.each(self.scales[1]),
            "output": nan((tokens, self.columns), torch.bfloat16, self.device),
        }


def _modules(op: OpPlan) -> list[Any]:  # noqa: ARG001 - one module for all
    """The JIT module that loads the trtllm-gen kernels."""
    return [flashinfer_api.jit_spec("flashinfer.jit.fused_moe", "gen_trtllm_gen_fused_moe_sm100_module")]


SPECS = {
    "trtllm_bf16_moe": OpSpec(PlainMoe, _modules, capable=(100, 103)),
    "trtllm_fp8_per_tensor_scale_moe": OpSpec(PlainMoe, _modules, capable=(100, 103)),
    "trtllm_fp8_block_scale_moe": OpSpec(Fp8BlockMoe, _modules, capable=(100, 103)),
    "trtllm_fp4_block_scale_moe": OpSpec(Fp4BlockMoe, _modules, capable=(100, 103)),
}
