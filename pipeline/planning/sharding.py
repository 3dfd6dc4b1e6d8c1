"""How servers divide a model over ranks: the matrix products and MoE layers as one rank sees them.

Projections that servers merge are merged here too: q, k, v into `qkv`; gate and up into `gate_up`; of multi-head latent
attention the two first projections into `fused_qkv_a`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.contract.plan import Layout

from .model_config import Mla, ModelConfig, Moe
from .problems import Problems
from .quantization import NONE, Kind, Quantization, Scheme, other

VOCAB_PADDING = 64  # the vocabulary is padded to a multiple of this before it is divided
MXFP4_BLOCK = 32
TRIED = 64  # sizes that a remedy may name


def pad(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass
class Shards:
    """The divisions of one model under one layout; `errors`: what could not be divided, by the cause."""

    model: ModelConfig
    layout: Layout
    errors: dict[str, list[str]] = field(default_factory=dict)

    def _refuse(self, cause: str, what: str) -> None:
        known = self.errors.setdefault(cause, [])
        if what not in known:
            known.append(what)

    def divide(self, size: int, by: int, what: str, who: str = "TP") -> int:
        """The share of one rank; a rest is an error."""
        if size % by:
            self._refuse(f"{who}={by} does not divide", f"{size} {what}")
        return max(1, size // by)

    def problem(self) -> str:
        """Everything that could not be divided, in one line; empty where all could."""
        return "; ".join(f"{cause} {', '.join(what)}" for cause, what in self.errors.items())

    def kv_heads(self) -> int:
        """Key-value heads of one rank: divided while there are enough, else each is on several ranks."""
        tp, heads = self.layout.tp, self.model.kv_heads
        if heads > tp:
            return self.divide(heads, tp, "key-value heads")
        if tp % heads:
            self._refuse(f"TP={tp} is no multiple of", f"{heads} key-value heads")
        return 1

    def vocab(self) -> int:
        """Rows of the padded output embedding on one rank."""
        return self.divide(pad(self.model.vocab, VOCAB_PADDING), self.layout.tp, "rows of the padded vocabulary")

    def experts(self, moe: Moe, *, mxfp4: bool) -> MoeShape:
        """A MoE layer on one rank; of mxfp4 an expert is divided in whole blocks, the last rank has fewer channels."""
        ranks, ep = self.layout.tp * self.layout.dp, self.layout.ep
        if ranks % ep:
            self._refuse(f"EP={ep} does not divide", f"the {ranks} ranks of TP×DP")
        tp = max(1, ranks // ep)  # ranks over which each expert is divided
        if mxfp4:
            inner = -(-pad(moe.intermediate, MXFP4_BLOCK) // MXFP4_BLOCK // tp) * MXFP4_BLOCK
        else:
            inner = self.divide(moe.intermediate, tp, "intermediate channels of an expert", "TP×DP/EP")
        return MoeShape(moe.experts, self.divide(moe.experts, ep, "experts", "EP"), self.model.hidden, inner,
                        moe.top_k, tp=tp, ep=ep)  # fmt: skip

    def stages(self) -> list[range]:
        """The layers of each pipeline stage: even, what is left goes to the middle stages, never to the last."""
        pp, layers = self.layout.pp, self.model.layers
        if layers < pp:
            self._refuse(f"PP={pp} is more than", f"{layers} layers")
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


@dataclass(frozen=True)
class Part:
    """One product `[tokens, k] × [n, k]ᵀ`, or one MoE layer, on one rank.

    `modules` are the names that a checkpoint may use below a layer (`lm_head`: below the model). `cut_n` and `cut_k`
    are the per-rank sizes that came of dividing; they must be whole quantization blocks. `layers` are decoder layers.
    `unsupported`: why no tuned op can take the part under this layout, though a server may run it.
    """

    name: str
    n: int
    k: int
    modules: tuple[str, ...]
    cut_n: tuple[int, ...] = ()
    cut_k: tuple[int, ...] = ()
    quantizable: bool = True
    moe: MoeShape | None = None
    scheme: Scheme = NONE
    layers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    bias: bool = False
    unsupported: str = ""


@dataclass(frozen=True)
class MoeShape:
    """A MoE layer on one rank; `tp` ranks divide each expert, `ep` ranks share the experts."""

    experts: int
    local_experts: int
    hidden: int
    intermediate: int
    top_k: int
    tp: int
    ep: int


def _attention(model: ModelConfig, shards: Shards) -> list[Part]:
    size, hidden = model.head_dim, model.hidden
    heads, kv = shards.divide(model.heads, shards.layout.tp, "attention heads"), shards.kv_heads()
    names = (*(f"self_attn.{x}_proj" for x in "qkv"), "self_attn.qkv_proj")
    qkv = Part("qkv", (heads + 2 * kv) * size, hidden, names, cut_n=(heads * size, kv * size))
    return [qkv, Part("o", hidden, heads * size, ("self_attn.o_proj",), cut_k=(heads * size,))]


def _latent_attention(model: ModelConfig, mla: Mla, shards: Shards) -> list[Part]:
    heads, hidden = shards.divide(model.heads, shards.layout.tp, "attention heads"), model.hidden
    down = mla.kv_rank + mla.rope
    queries, values = heads * (mla.nope + mla.rope), heads * mla.value
    kv_a, both = "self_attn.kv_a_proj_with_mqa", "self_attn.fused_qkv_a_proj_with_mqa"
    if mla.q_rank:
        first = [
            Part("fused_qkv_a", mla.q_rank + down, hidden, ("self_attn.q_a_proj", kv_a, both)),
            Part("q_b", queries, mla.q_rank, ("self_attn.q_b_proj",), cut_n=(queries,)),
        ]
    else:
        first = [
            Part("q", queries, hidden, ("self_attn.q_proj",), cut_n=(queries,)),
            Part("kv_a", down, hidden, (kv_a,)),
        ]
    up = heads * (mla.nope + mla.value)
    return [
        *first,
        Part("kv_b", up, mla.kv_rank, ("self_attn.kv_b_proj",), cut_n=(up,)),
        Part("o", hidden, values, ("self_attn.o_proj",), cut_k=(values,)),
    ]


def _mlp(prefix: str, inner: int, hidden: int, at: str = "mlp") -> list[Part]:
    names = (f"{at}.gate_proj", f"{at}.up_proj", f"{at}.gate_up_proj")
    return [
        Part(f"{prefix}gate_up", 2 * inner, hidden, names, cut_n=(inner,)),
        Part(f"{prefix}down", hidden, inner, (f"{at}.down_proj",), cut_k=(inner,)),
    ]


def _experts(model: ModelConfig, moe: Moe, shards: Shards, quantization: Quantization) -> list[Part]:
    at = moe.keys.modules
    modules = (at, f"{at}.0.gate_proj", f"{at}.0.w1")
    probe = quantization.scheme([f"model.layers.{moe.layers[0]}.{m}" for m in modules], experts=True)
    shape = shards.experts(moe, mxfp4=probe.kind is Kind.MXFP4)
    inner, layout = shape.intermediate, shards.layout
    cut = (inner,) if shape.tp > 1 else ()
    router = other("float32 weights") if moe.keys.router_float32 else NONE
    found = [
        Part("router", moe.experts, model.hidden, (moe.keys.router,), quantizable=False, scheme=router),
        Part("experts", 2 * inner, model.hidden, modules, cut_n=cut, cut_k=cut, moe=shape, bias=moe.bias),
    ]
    if moe.shared:
        # With expert, tensor and data parallelism together each rank has other tokens there, and all of the shared
        # expert (vLLM's config/parallel.py, `use_sequence_parallel_moe`, on in its default all-to-all backend).
        by = 1 if min(layout.ep, layout.tp, layout.dp) > 1 else layout.tp
        shared = shards.divide(moe.shared, by, "intermediate channels of the shared expert")
        found += _mlp("shared_", shared, model.hidden, moe.keys.shared_modules)
    return found


def _layer_parts(
    model: ModelConfig, shards: Shards, quantization: Quantization
) -> tuple[list[Part], list[Part], list[Part]]:
    """Parts of every layer, of the dense layers alone, and of the MoE layers alone."""
    every = _latent_attention(model, model.mla, shards) if model.mla else _attention(model, shards)
    sparse = _experts(model, model.moe, shards, quantization) if model.moe and model.moe.layers else []
    dense = []
    if not model.moe or len(model.moe.layers) < model.layers:
        inner = shards.divide(model.intermediate, shards.layout.tp, "intermediate channels")
        dense = _mlp("", inner, model.hidden)
    return every, dense, sparse


def _try_all(model: ModelConfig, layout: Layout, quantization: Quantization) -> Shards:
    """Every division of a model, tried."""
    shards = Shards(model, layout)
    _layer_parts(model, shards, quantization)
    shards.vocab()
    shards.stages()
    return shards


def _remedy(model: ModelConfig, layout: Layout, quantization: Quantization) -> str:
    """Which sizes would do, of the first of TP, EP and PP that can fix it alone."""
    wrong = _try_all(model, layout, quantization).problem()
    for name in sorted(("tp", "ep", "pp"), key=lambda n: wrong.find(f"{n.upper()}=") % (len(wrong) + 1)):
        fits = []
        for size in range(1, TRIED + 1):
            if not _try_all(model, replace(layout, **{name: size}), quantization).errors:
                fits.append(str(size))
        if fits:
            return f"{name.upper()} may be {', '.join(fits)}"
    return "no single change fixes it: take smaller sizes, powers of two"


def _check_blocks(part: Part, tp: int, problems: Problems) -> Part:
    """A divided size must hold whole quantization blocks: serving engines refuse to load a product otherwise.

    Experts with fp8 blocks are loaded all the same by vLLM 0.33, which serves them with smaller blocks through Triton
    (fused_moe/oracle/fp8.py), so that they are only left out; vLLM 0.28 and SGLang 0.5.23 refuse them.
    """
    rows, columns = part.scheme.block
    for size, block in [*((n, rows) for n in part.cut_n), *((k, columns) for k in part.cut_k)]:
        if tp > 1 and size % block:
            wrong = f"TP={tp} leaves {part.name} {size} channels per rank, not whole {part.scheme} blocks of {block}"
            if part.moe is not None and part.scheme.kind is Kind.FP8_BLOCK:
                served = "vLLM 0.33 serves such experts through Triton, vLLM 0.28 and SGLang 0.5.23 refuse them"
                return replace(part, unsupported=f"{wrong}; {served}; expert parallelism (EP) keeps them whole")
            problems.add(wrong, "take a smaller TP, or expert parallelism for the experts (EP)")
            break
    return part


def model_parts(model: ModelConfig, layout: Layout, quantization: Quantization, problems: Problems) -> list[Part]:
    """Every part of one rank in the order a layer runs them; what cannot be divided is added to `problems`."""
    if layout.ep > 1 and not model.moe:
        problems.add(f"EP={layout.ep}: {model.name} has no experts to share", "leave EP out")
    shards = Shards(model, layout)
    every, dense, sparse = _layer_parts(model, shards, quantization)
    vocab, stages = shards.vocab(), shards.stages()
    if shards.errors:
        problems.add(f"{model.name}: {shards.problem()}", _remedy(model, layout, quantization))
        return []
    moe_layers = frozenset(model.moe.layers) if model.moe else frozenset()
    grouped: dict[Part, list[int]] = {}
    for i in range(model.layers):
        for part in (*every, *(sparse if i in moe_layers else dense)):
            modules = [f"model.layers.{i}.{m}" for m in part.modules]
            scheme = quantization.scheme(modules, experts=part.moe is not None) if part.quantizable else NONE
            grouped.setdefault(replace(part, scheme=scheme) if scheme is not NONE else part, []).append(i)
    kinds = {part.scheme.kind for part in grouped if part.moe}
    if Kind.MXFP4 in kinds and len(kinds) > 1:  # the two divide experts differently
        problems.add("config.json: some MoE layers are mxfp4 and others are not", "such a model cannot be planned")
    found = []
    for part, layers in grouped.items():
        checked = _check_blocks(part, part.moe.tp if part.moe else layout.tp, problems)
        held = frozenset(s for s, stage in enumerate(stages) if any(i in stage for i in layers))
        found.append(replace(checked, layers=tuple(layers), ranks=shards.ranks(held)))
    head = Part("lm_head", vocab, model.hidden, ("lm_head",), quantizable=False)
    found.append(replace(head, layers=(model.layers,), ranks=shards.ranks(frozenset({layout.pp - 1}))))
    return _named(found)


def quantizable_modules(parts: Sequence[Part]) -> list[str]:
    """The names of all modules whose scheme the quantization decides."""
    return [f"model.layers.{i}.{m}" for part in parts if part.quantizable for i in part.layers for m in part.modules]


def _named(parts: Sequence[Part]) -> list[Part]:
    """Parts with unique names: where one part is quantized in some layers only, the scheme joins the name."""
    names = [part.name for part in parts]
    return [
        replace(part, name=f"{part.name}.{str(part.scheme.kind).replace(' ', '_')}")
        if names.count(part.name) > 1
        else part
        for part in parts
    ]
