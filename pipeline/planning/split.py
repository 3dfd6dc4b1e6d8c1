"""How serving engines divide a model over ranks, and what they refuse to divide."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.contract.plan import Layout

from .facts import Facts

VOCAB_PADDING = 64  # the vocabulary is padded to a multiple of this before it is divided
MXFP4_BLOCK = 32


def pad(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass
class Split:
    """The divisions of one model under one layout; `misfits` says what could not be divided, by what it is due to."""

    facts: Facts
    layout: Layout
    misfits: dict[str, list[str]] = field(default_factory=dict)

    def _misfit(self, cause: str, what: str) -> None:
        known = self.misfits.setdefault(cause, [])
        if what not in known:
            known.append(what)

    def _divide(self, size: int, by: int, what: str, who: str = "TP") -> int:
        if size % by:
            self._misfit(f"{who}={by} does not divide", f"{size} {what}")
        return max(1, size // by)

    def problem(self) -> str:
        """Everything that could not be divided, in one line; empty where all could."""
        return "; ".join(f"{cause} {', '.join(what)}" for cause, what in self.misfits.items())

    @property
    def moe_ranks(self) -> int:
        """Ranks that share one MoE layer: those of tensor and data parallelism together."""
        return self.layout.tp * self.layout.dp

    @property
    def moe_tp(self) -> int:
        """Over how many ranks each expert is divided, once expert parallelism has dealt the experts out."""
        return max(1, self.moe_ranks // self.layout.ep)

    def heads(self) -> int:
        """Attention heads of one rank."""
        return self._divide(self.facts.heads, self.layout.tp, "attention heads")

    def kv_heads(self) -> int:
        """Key-value heads of one rank: divided while there are enough, else each held by several ranks."""
        tp, heads = self.layout.tp, self.facts.kv_heads
        if heads > tp:
            return self._divide(heads, tp, "key-value heads")
        if tp % heads:
            self._misfit(f"TP={tp} is no multiple of", f"{heads} key-value heads")
        return 1

    def inner(self, size: int, what: str = "intermediate channels") -> int:
        """Channels of a dense layer on one rank."""
        return self._divide(size, self.layout.tp, what)

    def shared(self, size: int) -> int:
        """Channels of the shared expert on one rank.

        With expert, tensor and data parallelism together each rank has other tokens there, and all of the expert
        (vLLM's config/parallel.py, `use_sequence_parallel_moe`, on in its default all-to-all backend).
        """
        if min(self.layout.ep, self.layout.tp, self.layout.dp) > 1:
            return size
        return self.inner(size, "intermediate channels of the shared expert")

    def vocab(self) -> int:
        """Rows of the padded output embedding on one rank."""
        return self._divide(pad(self.facts.vocab, VOCAB_PADDING), self.layout.tp, "rows of the padded vocabulary")

    def experts(self) -> int:
        """Experts of one rank."""
        assert self.facts.moe is not None
        if self.moe_ranks % self.layout.ep:
            self._misfit(f"EP={self.layout.ep} does not divide", f"the {self.moe_ranks} ranks of TP×DP")
        return self._divide(self.facts.moe.experts, self.layout.ep, "experts", "EP")

    def expert_inner(self, *, mxfp4: bool) -> int:
        """Channels of one expert on one rank; mxfp4 deals out whole blocks, so that the last rank holds fewer."""
        assert self.facts.moe is not None
        size = self.facts.moe.intermediate
        if mxfp4:
            blocks = pad(size, MXFP4_BLOCK) // MXFP4_BLOCK
            return -(-blocks // self.moe_tp) * MXFP4_BLOCK
        return self._divide(size, self.moe_tp, "intermediate channels of an expert", "TP×DP/EP")

    def stages(self) -> list[range]:
        """The layers of each pipeline stage: even, what is left goes to the middle stages, never to the last."""
        pp, layers = self.layout.pp, self.facts.layers
        if layers < pp:
            self._misfit(f"PP={pp} is more than", f"{layers} layers")
            return [range(layers)] * pp
        counts = [layers // pp] * pp
        for i in range(layers % pp):
            counts[-(i + 2)] += 1
        ends = [sum(counts[: i + 1]) for i in range(pp)]
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def ranks(self, stages: frozenset[int]) -> tuple[int, ...]:
        """The ranks of some pipeline stages, empty where that is all; tensor parallel ranks are neighbours."""
        pp, tp = self.layout.pp, self.layout.tp
        if len(stages) == pp:
            return ()
        return tuple(r for r in range(self.layout.world) if r // tp % pp in stages)
