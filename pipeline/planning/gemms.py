"""The matrix products of a model as one rank sees them, under tensor parallelism as serving engines do it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.contract.plan import Layout

from .facts import Facts
from .problems import Problems

VOCAB_PADDING = 64  # serving engines pad the vocabulary to a multiple of this before they divide it


@dataclass(frozen=True)
class Gemm:
    """One product `[tokens, k] x [n, k]ᵀ` on one rank, and in how many layers of the model it runs."""

    name: str
    n: int
    k: int
    layers: int


def pad(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def _divide(size: int, tp: int, what: str, problems: Problems) -> int:
    if size % tp:
        fits = [str(t) for t in range(1, 65) if size % t == 0]
        problems.add(f"TP={tp} does not divide {size} {what}", f"TP may be {', '.join(fits)}")
    return max(1, size // tp)


def kv_heads_per_rank(facts: Facts, tp: int, problems: Problems) -> int:
    """Key-value heads of one rank: divided while there are enough, else each is held by several ranks."""
    if facts.kv_heads >= tp:
        return _divide(facts.kv_heads, tp, "key-value heads", problems)
    if tp % facts.kv_heads:
        problems.add(
            f"TP={tp} is no multiple of {facts.kv_heads} key-value heads, which then cannot be replicated evenly",
            f"TP may be a divisor or a multiple of {facts.kv_heads}",
        )
    return 1


def gemms(facts: Facts, layout: Layout, problems: Problems) -> list[Gemm]:
    """Every product of one rank, in the order a layer runs them."""
    tp = layout.tp
    heads = _divide(facts.heads, tp, "attention heads", problems)
    kv = kv_heads_per_rank(facts, tp, problems)
    inner = _divide(facts.intermediate, tp, "intermediate channels", problems)
    vocab = _divide(pad(facts.vocab, VOCAB_PADDING), tp, "rows of the padded vocabulary", problems)
    return [
        Gemm("qkv", (heads + 2 * kv) * facts.head_dim, facts.hidden, facts.layers),
        Gemm("o", facts.hidden, heads * facts.head_dim, facts.layers),
        Gemm("gate_up", 2 * inner, facts.hidden, facts.layers),
        Gemm("down", facts.hidden, inner, facts.layers),
        Gemm("lm_head", vocab, facts.hidden, 1),
    ]
