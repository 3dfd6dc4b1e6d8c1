"""A MoE layer without block scales for the trtllm-gen kernels: its inputs and reference.

The kernels want rows shuffled, which cannot be wrong where the rows of an expert are alike. All values are positive:
nothing cancels, so that what rounding may do stays small beside every element of the result. Experts differ by a
factor and tokens by a power of two, so that a mixed-up expert or token shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import normal, seed_for, unit_roundoff

from .moe import logits, moe_excess, route, sizes
from .question import offered


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

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """What the runner offers."""
        return offered(self, tokens)

    @abstractmethod
    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""
