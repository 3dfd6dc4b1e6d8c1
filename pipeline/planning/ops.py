"""Which op of the tuner stands for a part of the model, or why none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contract.plan import OpPlan, Untuned

from .abilities import BF16_MENDED, MOE_KEY_WITHOUT_RANK, NEWEST_READ, Abilities
from .facts import Facts
from .parts import Part
from .quant import Kind
from .split import MXFP4_PADDING, pad
from .target import BLACKWELL, HOPPER_ON, TRTLLM_GEN, Target, backends

CPU_NOTE = "one expert's product: its buckets count the tokens that reach one expert"
CUDNN_BF16 = (
    f"below FlashInfer {BF16_MENDED} its entries cannot be found again: the workspace's size is in the key, "
    "and cuDNN resizes it while it is tuned"
)
# family -> FlashInfer's RoutingMethodType, as its trtllm-gen ops are told it
ROUTING = {
    "mixtral": "renormalize",
    "qwen3_moe": "renormalize_naive",
    "gpt_oss": "renormalize",
    "deepseek_v2": "default",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}
# What has been measured on a GPU for this project; everything else is planned from FlashInfer's code alone.
PROVEN = {"mm_bf16": (90,), "bmm_fp8": (90,)}


@dataclass(frozen=True)
class Context:
    """What the choice of an op depends on beside the part itself."""

    facts: Facts
    target: Target
    version: str
    abilities: Abilities
    buckets: tuple[int, ...]
    backends: Mapping[str, Sequence[str]]


class NotTuned(Exception):
    """A part has no op here; the text is the reason that the plan states."""


def _gemm(part: Part, context: Context, op: str, dtype: str, **options: str) -> OpPlan:
    out = context.facts.dtype if context.facts.dtype in ("bfloat16", "float16") else "bfloat16"
    return OpPlan(
        name=part.name,
        op=op,
        shape={"n": part.n, "k": part.k},
        dtypes={"a": dtype, "b": dtype, "out": out},
        buckets=context.buckets,
        backends=backends(op, context.target.sm, context.backends),
        options=options,
        ranks=part.ranks,
        layers=len(part.layers),
        notes=_unproven(op, context),
    )


def _unproven(op: str, context: Context) -> tuple[str, ...]:
    if context.target.sm in PROVEN.get(op, ()):
        return ()
    return (f"unverified: planned from FlashInfer's code, {op} has not been run on such a GPU for this project",)


def _mm_bf16(part: Part, context: Context) -> OpPlan:
    if context.facts.dtype != "bfloat16":
        raise NotTuned(f"{context.facts.dtype}: FlashInfer's mm_bf16 takes bfloat16 alone")
    op = _gemm(part, context, "mm_bf16", "bfloat16")
    names = tuple(b for b in op.backends if b != "tinygemm" or part.n % 16 == 0)
    if not names:
        raise NotTuned(f"tinygemm takes n in multiples of 16, this is {part.n}")
    if "cublaslt" not in names or not context.abilities.exact_only:
        return _with(op, backends=names)
    note = (
        f"cuBLASLt entries of FlashInfer {context.version} answer exactly these token counts and none between "
        f"(the key holds the real count; mended in {BF16_MENDED}): name the server's batch sizes with --buckets"
    )
    return _with(op, backends=names, options={"hits": "exact"}, notes=(*op.notes, note))


def _with(op: OpPlan, **changes: object) -> OpPlan:
    return replace(op, **changes)  # type: ignore[arg-type]


def _multiple(part: Part, of: int, op: str) -> None:
    if part.n % of or part.k % of:
        raise NotTuned(f"{op} takes n and k in multiples of {of}, this is {part.n}×{part.k}")


def _cuda_gemm(part: Part, context: Context) -> OpPlan:
    sm, scheme = context.target.sm, part.scheme
    if scheme.kind is Kind.NONE:
        return _mm_bf16(part, context)
    if scheme.kind is Kind.FP8_TENSOR:
        if sm != 89 and sm not in HOPPER_ON:
            raise NotTuned(f"bmm_fp8 needs compute capability 8.9, {context.target.arch} is below")
        _multiple(part, 16, "bmm_fp8")
        return _gemm(part, context, "bmm_fp8", "float8_e4m3fn")
    if scheme.kind is Kind.FP8_CHANNEL:
        raise NotTuned(f"{scheme}: bmm_fp8 takes one scale per tensor, and no other tuned op takes these")
    if scheme.kind is Kind.FP8_BLOCK:
        raise NotTuned(f"{scheme}: FlashInfer's products with block scales (DeepGEMM, groupwise) pass by its AutoTuner")
    if scheme.kind is Kind.OTHER:
        raise NotTuned(f"{scheme}: not a format of FlashInfer's tuned ops")
    if sm not in BLACKWELL:
        raise NotTuned(f"{scheme}: mm_fp4 and mm_mxfp8 need compute capability 10.0, {context.target.arch} is below")
    _multiple(part, 32, "block-scaled products")
    if scheme.kind is Kind.MXFP8:
        return _gemm(part, context, "mm_mxfp8", "float8_e4m3fn", format="mxfp8")
    op = _gemm(part, context, "mm_fp4", "uint8", format=scheme.kind.value)
    if scheme.kind is Kind.MXFP4 and "mm_fp4" not in context.backends:
        return _with(op, backends=("cudnn",))  # the only one that takes blocks of 32
    return op


def _routing(part: Part, context: Context) -> tuple[tuple[int, ...], dict[str, str]]:
    """The buckets at which every expert-parallel rank has tokens, and how the inputs see to it.

    Inputs deal the (token, expert) pairs out to the ranks in turn, so a rank has tokens once there are as many pairs
    as ranks; a random choice would only make that likely.
    """
    assert part.moe is not None
    ep, top_k = part.moe.ep, part.moe.top_k
    if ep == 1:
        return context.buckets, {}
    kept = tuple(b for b in context.buckets if b * top_k >= ep)
    if not kept:
        raise NotTuned(
            f"{top_k} experts per token reach all {ep} expert-parallel ranks from {-(-ep // top_k)} tokens on"
        )
    least = min(kept[0], kept[0] * top_k // ep)
    return kept, {"routing": "round_robin", "tokens_per_rank_min": str(least)}


def _moe_op(part: Part, context: Context, op: str, dtypes: tuple[str, str], **options: str) -> OpPlan:
    shape = part.moe
    assert shape is not None
    kept, routing = _routing(part, context)
    moe = context.facts.moe
    assert moe is not None
    extras = {"activation": moe.activation, **({"bias": "true"} if part.bias else {})}
    return OpPlan(
        name=part.name,
        op=op,
        shape=dict(vars(shape)),
        dtypes={"a": dtypes[0], "b": dtypes[1], "out": "bfloat16"},
        buckets=kept,
        options={**extras, **routing, **options},
        ranks=part.ranks,
        layers=len(part.layers),
        notes=_unproven(op, context),
    )


def _cutlass_moe(part: Part, context: Context, dtype: str) -> OpPlan:
    if context.target.sm not in (89, *HOPPER_ON):
        raise NotTuned(f"cutlass_fused_moe needs compute capability 8.9, {context.target.arch} is below")
    op = _moe_op(part, context, "cutlass_fused_moe", (dtype, dtype))
    assert part.moe is not None
    if context.abilities.moe_keys_hold_rank and part.moe.tp * part.moe.ep > 1:
        note = f"FlashInfer {context.version} writes the rank into this op's keys: the file needs every rank's entries "
        return _with(op, notes=(*op.notes, f"{note}(gone in {MOE_KEY_WITHOUT_RANK})"))
    return op


def _trtllm_moe(part: Part, context: Context, op: str, dtypes: tuple[str, str], **options: str) -> OpPlan:
    if context.target.sm not in TRTLLM_GEN:
        raise NotTuned(
            f"{part.scheme}: {op} has kernels for compute capability 10.0 and 10.3, not {context.target.arch}"
        )
    moe = context.facts.moe
    assert moe is not None
    options["routing_method"] = ROUTING[context.facts.family]
    if options["routing_method"] == "deepseek_v3":
        options |= {"n_group": str(moe.groups or 1), "topk_group": str(moe.top_groups or 1)}
    return _moe_op(part, context, op, dtypes, **options)


def _mxfp4_moe(part: Part, context: Context) -> OpPlan:
    if context.target.sm == 90:
        raise NotTuned("mxfp4: cutlass_fused_moe's kernels for mxfp4 weights on Hopper have no adapter in this tuner")
    op = _trtllm_moe(part, context, "trtllm_fp4_block_scale_moe", ("bfloat16", "uint8"), format="mxfp4")
    padded = {name: pad(op.shape[name], MXFP4_PADDING) for name in ("hidden", "intermediate")}
    changed = [f"{name} {op.shape[name]} → {size}" for name, size in padded.items() if size != op.shape[name]]
    notes = (f"padded to multiples of {MXFP4_PADDING}, as servers do: {', '.join(changed)}",) if changed else ()
    return _with(op, shape={**op.shape, **padded}, notes=(*op.notes, *notes))


def _cuda_moe(part: Part, context: Context) -> OpPlan:
    kind, sm = part.scheme.kind, context.target.sm
    if kind is Kind.NONE:
        if context.facts.dtype not in ("bfloat16", "float16"):
            raise NotTuned(f"{context.facts.dtype}: cutlass_fused_moe is tuned for bfloat16 and float16")
        return _cutlass_moe(part, context, context.facts.dtype)
    if kind is Kind.FP8_TENSOR:
        return _cutlass_moe(part, context, "float8_e4m3fn")
    if kind is Kind.FP8_BLOCK:
        if sm not in TRTLLM_GEN:
            raise NotTuned(
                f"{part.scheme}: cutlass_fused_moe's profiling of block scales runs nothing "
                f"(all versions to {NEWEST_READ}), so its winners would be noise"
            )
        return _trtllm_moe(part, context, "trtllm_fp8_block_scale_moe", ("float8_e4m3fn",) * 2, format="fp8_block")
    if kind is Kind.MXFP8:
        return _trtllm_moe(part, context, "trtllm_fp8_block_scale_moe", ("float8_e4m3fn",) * 2, format="mxfp8")
    if kind is Kind.NVFP4:
        return _trtllm_moe(part, context, "trtllm_fp4_block_scale_moe", ("uint8", "uint8"), format="nvfp4")
    if kind is Kind.MXFP4:
        return _mxfp4_moe(part, context)
    if kind is Kind.FP8_CHANNEL:
        raise NotTuned(f"{part.scheme}: cutlass_fused_moe takes one scale per expert")
    raise NotTuned(f"{part.scheme}: not a format of FlashInfer's tuned MoE ops")


def _cpu(part: Part, context: Context) -> list[OpPlan]:
    def product(name: str, n: int, k: int, *notes: str) -> OpPlan:
        return OpPlan(
            name=name,
            op="cpu_mm",
            shape={"n": n, "k": k},
            dtypes={"a": "float32", "b": "float32", "out": "float32"},
            buckets=context.buckets,
            ranks=part.ranks,
            layers=len(part.layers),
            notes=notes,
        )

    if part.moe is None:
        return [product(part.name, part.n, part.k)]
    hidden, inner = part.moe.hidden, part.moe.intermediate
    return [
        product(f"{part.name}_gate_up", 2 * inner, hidden, CPU_NOTE),
        product(f"{part.name}_down", hidden, inner, CPU_NOTE),
    ]


def choose(part: Part, context: Context) -> tuple[list[OpPlan], list[Untuned]]:
    """The ops of one part, and what is left out of it with the reason."""
    if context.target.device == "cpu":
        return _cpu(part, context), []
    try:
        op = (_cuda_gemm if part.moe is None else _cuda_moe)(part, context)
    except NotTuned as refusal:
        return [], [Untuned(part.name, str(refusal))]
    missing = [b for b in context.buckets if b not in op.buckets]
    if not missing:
        return [op], []
    assert part.moe is not None
    reason = f"{part.moe.top_k} experts per token leave some of {part.moe.ep} expert-parallel ranks without tokens"
    return [op], [Untuned(f"{part.name} at {', '.join(map(str, missing))} tokens", reason)]
