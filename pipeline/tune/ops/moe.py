"""What the MoE layers share: which expert gets which token, this rank's place, and a float64 reference.

Weights are `[local experts, 2 · intermediate, hidden]`, the upper half of a layer (`up`) before its gate, and
`[local experts, hidden, intermediate]`. The layer is `Σ_k p_k · down_k(silu(gate_k(x)) · up_k(x))`, over the experts
of this rank.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.contract.plan import OpPlan

from .reference import seed_for, spread, unit_roundoff


class Matrices(Protocol):
    """One float32 matrix per expert, made when it is asked for: copies of all would not fit beside the weight."""

    def __len__(self) -> int: ...
    def __getitem__(self, expert: int, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Scaled:
    """The values of a weight `[experts, rows, columns]` times one scale per expert, `[experts]`."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        return self.weight[expert].float() * self.scale[expert]


@dataclass(frozen=True)
class Sizes:
    """A MoE layer as one rank sees it, and the rank's place among those that divide it."""

    experts: int
    local: int
    hidden: int
    inner: int
    top_k: int
    tp: int
    ep: int
    tp_rank: int
    ep_rank: int

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.ep_rank * self.local

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of the two weights."""
        return (self.local, 2 * self.inner, self.hidden), (self.local, self.hidden, self.inner)


def sizes(op: OpPlan) -> Sizes:
    """Read an op's shape. Ranks are counted within the op: TP is the inner dimension, EP the outer."""
    rank = int(os.environ.get("RANK") or 0)
    place = op.ranks.index(rank) if rank in op.ranks else rank
    s = op.shape
    tp, ep = s["tp"], s["ep"]
    return Sizes(s["experts"], s["local_experts"], s["hidden"], s["intermediate"], s["top_k"], tp, ep,
                 place % tp, place // tp % ep)  # fmt: skip


class MoeLayer(ABC):
    """One MoE layer of a plan on this rank.

    `weights` are the values of both weights as the kernels see them, `laid` the tensors that they read.
    """

    weights: tuple[Matrices, Matrices]
    laid: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, op: OpPlan, device: torch.device, seed: int) -> None:
        self.op, self.sizes, self.device = op, sizes(op), device
        self.seed = seed_for(seed, op.op, *sorted(op.shape.items()))

    def each(self, value: float) -> torch.Tensor:
        """The same float32 for every expert of this rank."""
        return torch.full((self.sizes.local,), value, dtype=torch.float32, device=self.device)

    def routed(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts `[tokens, top_k]` (int32, distinct in a row) and their weights (float32, rows add up to 1).

        `routing` = `round_robin` deals the pairs out to the expert-parallel ranks in turn, so that none goes without.
        With groups, each token stays within the number of groups that its routing allows.
        """
        s, options, device = self.sizes, self.op.options, self.device
        generator = torch.Generator(device).manual_seed(seed_for(self.seed, "route", tokens))
        groups, per_token = int(options.get("n_group", "1")), int(options.get("topk_group", "1"))
        token = torch.arange(tokens, device=device)[:, None]
        place = torch.arange(s.top_k, device=device)[None, :]
        if groups > 1:
            size = s.experts // groups
            group = (token * per_token + place % per_token) % groups
            chosen = group * size + (token + place // per_token) % size
        elif options.get("routing") == "round_robin":
            pair = token * s.top_k + place
            chosen = pair % s.ep * s.local + pair // s.ep % s.local
        else:
            scores = torch.rand((tokens, s.experts), generator=generator, device=device)
            chosen = scores.topk(s.top_k, dim=1).indices
        weights = torch.rand((tokens, s.top_k), generator=generator, device=device) + 0.5
        return chosen.int(), weights / weights.sum(dim=1, keepdim=True)

    @abstractmethod
    def activation(self, tokens: int) -> torch.Tensor:
        """What the layer is given, `[tokens, hidden]`, as the kernels read it."""

    @abstractmethod
    def call(self, tokens: int) -> torch.Tensor:
        """Run the layer through the AutoTuner."""

    @abstractmethod
    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """Compare with the layer in float64."""


@dataclass(frozen=True)
class Gated:
    """What a layer does between its two products, and how exactly; by default SwiGLU without biases.

    `(clamp(up, ±limit) + beta) · g · sigmoid(alpha · g)` with `g = min(gate, limit)`. `biases` are those of the first
    product, `[experts, 2 · intermediate]`, and of the second, `[experts, hidden]`. `stored` is the unit roundoff with
    which the first product is stored before its bias is added, 0 where it is not. `independent`: no two of an expert's
    rows are alike, so that roundings in between differ in sign.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    stored: float = 0.0
    independent: bool = False

    def between(
        self, halves: Sequence[torch.Tensor], errors: Sequence[torch.Tensor], expert: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the second product is given for the halves of the first, up and gate, and how far it may be off."""
        wrong = [error + self.stored * half.abs() for half, error in zip(halves, errors, strict=True)]
        up, gate = halves
        if self.biases[0] is not None:
            biases = self.biases[0][expert].double().chunk(2)
            up, gate = up + biases[0], gate + biases[1]
        gate = gate.clamp(max=self.limit)
        gate, factor = gate * torch.sigmoid(self.alpha * gate), up.clamp(-self.limit, self.limit) + self.beta
        return factor * gate, wrong[0] * gate.abs() + 1.1 * wrong[1] * factor.abs()  # 1.1: the steepest slope

    def through(self, wrong: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """How far the second product may be off for what it is given being off by `wrong`.

        Errors of either sign exceed eight times their root mean square once in 10^13 (Hoeffding); four, of which
        `moe_excess` allows twice.
        """
        return 4 * (wrong**2 @ down.T**2).sqrt() if self.independent else wrong @ down.abs().T


SWIGLU = Gated()


def moe_excess(
    out: torch.Tensor,
    x: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[Matrices, Matrices],
    place: tuple[int, float],
    *,
    gated: Gated = SWIGLU,
) -> float:
    """How far `out` is from the layer in float64, as a multiple of what is allowed; at most 1 is right.

    `x` and `weights` are the values that the kernels see, already scaled; `place` is the first expert, and the unit
    roundoff of what lies between the two products (2^-8 for bfloat16, 2^-4 for fp8). Allowed is twice the sum of: a
    rounding of the result and of each expert's part, `inner · 2^-24` of the second product, and through it the
    roundings in between and `hidden · 2^-24` of the first.
    """
    first, between = place
    pick = spread(out.shape[0], out.device)
    x, out = x[pick].double(), out[pick].double()
    chosen, part = routed[0][pick].long() - first, routed[1][pick].double()
    exact, allowed = torch.zeros_like(out), torch.zeros_like(out)
    tiny, last = 2.0**-24, unit_roundoff(torch.bfloat16)
    for expert in range(len(weights[0])):
        share = (part * (chosen == expert)).sum(dim=1, keepdim=True)
        hit = share[:, 0] != 0
        if not bool(hit.any()):
            continue
        up, gate = weights[0][expert].double().chunk(2)
        down, mine = weights[1][expert].double(), x[hit]
        errors = [x.shape[1] * tiny * (mine.abs() @ side.abs().T) for side in (up, gate)]
        h, dh = gated.between([mine @ up.T, mine @ gate.T], errors, expert)
        y = h @ down.T
        dy = gated.through(dh + between * h.abs(), down) + h.shape[1] * tiny * (h.abs() @ down.abs().T) + last * y.abs()
        if gated.biases[1] is not None:
            y = y + gated.biases[1][expert].double()
        exact[hit] += share[hit] * y
        allowed[hit] += share[hit] * dy
    allowed += last * exact.abs()
    excess = torch.where(torch.isfinite(out), (out - exact).abs() / (2 * allowed + 1e-30), torch.inf)
    return float(excess.max())
