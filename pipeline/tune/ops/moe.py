"""What the MoE adapters share: which expert gets which token, this rank's place, and a float64 reference.

Weights are `[local experts, 2 · intermediate, hidden]`, the upper half of a layer (`up`) before its gate, and
`[local experts, hidden, intermediate]`. The layer is `Σ_k p_k · down_k(silu(gate_k(x)) · up_k(x))`, over the experts
of this rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pipeline.contract.plan import OpPlan
from pipeline.tune.inputs import seed_for, unit_roundoff

ROWS = 256  # tokens that are compared


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


def sizes(op: OpPlan) -> Sizes:
    """Read an op's shape. Ranks are counted within the op: TP is the inner dimension, EP the outer."""
    rank = int(os.environ.get("RANK") or 0)
    place = op.ranks.index(rank) if rank in op.ranks else rank
    s = op.shape
    tp, ep = s["tp"], s["ep"]
    return Sizes(s["experts"], s["local_experts"], s["hidden"], s["intermediate"], s["top_k"], tp, ep,
                 place % tp, place // tp % ep)  # fmt: skip


def route(op: OpPlan, tokens: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts `[tokens, top_k]` (int32, distinct in a row) and their weights (float32, rows add up to 1).

    `routing` = `round_robin` deals the pairs out to the expert-parallel ranks in turn, so that none goes without.
    With groups, each token stays within the number of groups that its routing allows.
    """
    s = sizes(op)
    generator = torch.Generator(device).manual_seed(seed_for(seed, "route", tokens))
    groups, per_token = int(op.options.get("n_group", "1")), int(op.options.get("topk_group", "1"))
    token = torch.arange(tokens, device=device)[:, None]
    place = torch.arange(s.top_k, device=device)[None, :]
    if groups > 1:
        size = s.experts // groups
        group = (token * per_token + place % per_token) % groups
        chosen = group * size + (token + place // per_token) % size
    elif op.options.get("routing") == "round_robin":
        pair = token * s.top_k + place
        chosen = pair % s.ep * s.local + pair // s.ep % s.local
    else:
        scores = torch.rand((tokens, s.experts), generator=generator, device=device)
        chosen = scores.topk(s.top_k, dim=1).indices
    weights = torch.rand((tokens, s.top_k), generator=generator, device=device) + 0.5
    return chosen.int(), weights / weights.sum(dim=1, keepdim=True)


def logits(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Router logits, float32, that any routing method turns into the chosen experts with equal weights."""
    found = torch.full((chosen.shape[0], experts), -8.0, device=chosen.device)
    return found.scatter_(1, chosen.long(), 8.0)


def moe_excess(
    out: torch.Tensor,
    x: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    place: tuple[int, float],
) -> float:
    """How far `out` is from the layer in float64, as a multiple of what is allowed; at most 1 is right.

    `x` and `weights` hold the values that the kernels see, already scaled; `place` is the first expert, and the unit
    roundoff of what lies between the two products (2^-8 for bfloat16, 2^-4 for fp8). Allowed is twice the sum of: a
    rounding of the result and of each expert's part, `inner · 2^-24` of the second product, and through it the
    rounding in between and `hidden · 2^-24` of the first.
    """
    first, between = place
    rows = min(ROWS, out.shape[0])
    pick = torch.linspace(0, out.shape[0] - 1, rows, device=out.device).round().long()
    x, out = x[pick].double(), out[pick].double()
    chosen, part = routed[0][pick].long() - first, routed[1][pick].double()
    exact, allowed = torch.zeros_like(out), torch.zeros_like(out)
    tiny, last = 2.0**-24, unit_roundoff(torch.bfloat16)
    for expert in range(weights[0].shape[0]):
        share = (part * (chosen == expert)).sum(dim=1, keepdim=True)
        hit = share[:, 0] != 0
        if not bool(hit.any()):
            continue
        up, gate = weights[0][expert].double().chunk(2)
        down, mine = weights[1][expert].double(), x[hit]
        a, b = mine @ up.T, mine @ gate.T
        errors = [x.shape[1] * tiny * (mine.abs() @ side.abs().T) for side in (up, gate)]
        h = a * torch.nn.functional.silu(b)
        dh = errors[0] * torch.nn.functional.silu(b).abs() + 1.1 * errors[1] * a.abs() + between * h.abs()
        y = h @ down.T
        dy = (dh + h.shape[1] * tiny * h.abs()) @ down.abs().T + last * y.abs()
        exact[hit] += share[hit] * y
        allowed[hit] += share[hit] * dy
    allowed += last * exact.abs()
    excess = torch.where(torch.isfinite(out), (out - exact).abs() / (2 * allowed + 1e-30), torch.inf)
    return float(excess.max())
