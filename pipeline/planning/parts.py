"""The matrix products and MoE layers of a model as one rank sees them, each with its quantization.

Projections that serving engines merge are merged here too: q, k, v into `qkv`; gate and up into `gate_up`; of
multi-head latent attention the two first projections into `fused_qkv_a`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.contract.plan import Layout

from .expressions import try_all
from .facts import Facts, Mla, Moe
from .problems import Problems
from .quant import NONE, Kind, Quantization, Scheme, other
from .split import Split

TRIED = 64  # sizes that a remedy may name


@dataclass(frozen=True)
class Part:
    """One product `[tokens, k] × [n, k]ᵀ`, or one MoE layer, on one rank.

    `modules` are the names that a checkpoint may use below a layer (`lm_head`: below the model). `cut_n` and `cut_k`
    hold the per-rank sizes that came of dividing, which a quantization block must fit. `layers` are decoder layers.
    `unfit` says why no tuned op can take the part under this layout, though a server may run it.
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
    unfit: str = ""


@dataclass(frozen=True)
class MoeShape:
    """A MoE layer on one rank; `tp` ranks divide each expert, `ep` ranks deal the experts out."""

    experts: int
    local_experts: int
    hidden: int
    intermediate: int
    top_k: int
    tp: int
    ep: int


def _attention(facts: Facts, split: Split) -> list[Part]:
    heads, size, hidden = split.heads(), facts.head_dim, facts.hidden
    kv = split.kv_heads()
    names = (*(f"self_attn.{x}_proj" for x in "qkv"), "self_attn.qkv_proj")
    qkv = Part("qkv", (heads + 2 * kv) * size, hidden, names, cut_n=(heads * size, kv * size))
    return [qkv, Part("o", hidden, heads * size, ("self_attn.o_proj",), cut_k=(heads * size,))]


def _latent_attention(facts: Facts, mla: Mla, split: Split) -> list[Part]:
    heads, hidden, down = split.heads(), facts.hidden, mla.kv_rank + mla.rope
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


def _experts(facts: Facts, moe: Moe, split: Split, quantization: Quantization) -> list[Part]:
    at = moe.keys.modules
    modules = (at, f"{at}.0.gate_proj", f"{at}.0.w1")
    probe = quantization.scheme([f"model.layers.{moe.layers[0]}.{m}" for m in modules], experts=True)
    inner = split.expert_inner(mxfp4=probe.kind is Kind.MXFP4)
    shape = MoeShape(moe.experts, split.experts(), facts.hidden, inner, moe.top_k, tp=split.moe_tp, ep=split.layout.ep)
    cut = (inner,) if split.moe_tp > 1 else ()
    router = other("float32 weights") if moe.keys.router_float32 else NONE
    found = [
        Part("router", moe.experts, facts.hidden, (moe.keys.router,), quantizable=False, scheme=router),
        Part("experts", 2 * inner, facts.hidden, modules, cut_n=cut, cut_k=cut, moe=shape, bias=moe.bias),
    ]
    if moe.shared:
        found += _mlp("shared_", split.shared(moe.shared), facts.hidden, moe.keys.shared_modules)
    return found


def _model(facts: Facts, split: Split, quantization: Quantization) -> tuple[list[Part], list[Part], list[Part]]:
    """Parts of every layer, of the dense layers alone, and of the MoE layers alone."""
    every = _latent_attention(facts, facts.mla, split) if facts.mla else _attention(facts, split)
    sparse = _experts(facts, facts.moe, split, quantization) if facts.moe and facts.moe.layers else []
    dense = []
    if not facts.moe or len(facts.moe.layers) < facts.layers:
        dense = _mlp("", split.inner(facts.intermediate), facts.hidden)
    return every, dense, sparse


def _tried(facts: Facts, layout: Layout, quantization: Quantization) -> Split:
    """A split with every division tried."""
    split = Split(facts, layout)
    _model(facts, split, quantization)
    split.vocab()
    split.stages()
    return split


def _remedy(facts: Facts, layout: Layout, quantization: Quantization) -> str:
    """Which sizes would do, of the first of TP, EP and PP that can mend it alone."""
    wrong = _tried(facts, layout, quantization).problem()
    for name in sorted(("tp", "ep", "pp"), key=lambda n: wrong.find(f"{n.upper()}=") % (len(wrong) + 1)):
        fits = []
        for size in range(1, TRIED + 1):
            if not _tried(facts, replace(layout, **{name: size}), quantization).misfits:
                fits.append(str(size))
        if fits:
            return f"{name.upper()} may be {', '.join(fits)}"
    return "no single change mends it: take smaller sizes, powers of two"


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
                return replace(part, unfit=f"{wrong}; {served}; expert parallelism (EP) keeps them whole")
            problems.add(wrong, "take a smaller TP, or expert parallelism for the experts (EP)")
            break
    return part


def model_parts(facts: Facts, layout: Layout, quantization: Quantization, problems: Problems) -> list[Part]:
    """Every part of one rank in the order a layer runs them; what cannot be divided is added to `problems`."""
    if layout.ep > 1 and not facts.moe:
        problems.add(f"EP={layout.ep}: {facts.name} has no experts to deal out", "leave EP out")
    if quantization.expressions:  # in a copy, on what is asked below at the most: that may never end
        all_parts = [part for parts in _model(facts, Split(facts, layout), Quantization()) for part in parts]
        names = quantizable_modules([replace(part, layers=tuple(range(facts.layers))) for part in all_parts])
        if not try_all(quantization.expressions, quantization.spelled(names), problems):
            return []
    split = Split(facts, layout)
    every, dense, sparse = _model(facts, split, quantization)
    vocab, stages = split.vocab(), split.stages()
    if split.misfits:
        problems.add(f"{facts.name}: {split.problem()}", _remedy(facts, layout, quantization))
        return []
    moe_layers = frozenset(facts.moe.layers) if facts.moe else frozenset()
    grouped: dict[Part, list[int]] = {}
    for i in range(facts.layers):
        for part in (*every, *(sparse if i in moe_layers else dense)):
            modules = [f"model.layers.{i}.{m}" for m in part.modules]
            scheme = quantization.scheme(modules, experts=part.moe is not None) if part.quantizable else NONE
            grouped.setdefault(replace(part, scheme=scheme) if scheme is not NONE else part, []).append(i)
    kinds = {part.scheme.kind for part in grouped if part.moe}
    if Kind.MXFP4 in kinds and len(kinds) > 1:  # the two divide experts differently
        problems.add("config.json: some MoE layers are mxfp4 and others are not", "such a model cannot be planned")
    found = []
    for part, layers in grouped.items():
        checked = _check_blocks(part, split.moe_tp if part.moe else layout.tp, problems)
        held = frozenset(s for s, stage in enumerate(stages) if any(i in stage for i in layers))
        found.append(replace(checked, layers=tuple(layers), ranks=split.ranks(held)))
    head = Part("lm_head", vocab, facts.hidden, ("lm_head",), quantizable=False)
    found.append(replace(head, layers=(facts.layers,), ranks=split.ranks(frozenset({layout.pp - 1}))))
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
