"""Which op of the tuner stands for a MoE layer, or why none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.features import NEWEST_READ
from pipeline.flashinfer.gpus import HOPPER, HOPPER_ON, TRTLLM_GEN
from pipeline.flashinfer.moe_keys import rank_in_key

from .ops import Context, NotTuned, padded, unproven
from .quantization import Kind
from .sharding import Part

# Multiples of the hidden and of the intermediate size per rank that vLLM 0.28 and 0.33 pad to:
# fused_moe/oracle/mxfp4.py and unquantized.py and, in layers/quantization/utils, flashinfer_fp4_moe.py and
# flashinfer_utils.py
_MXFP4_ON_HOPPER = {"hidden": 128, "intermediate": 128}
_FP8 = {"intermediate": 16}
_BF16 = {"intermediate": 128}
_F8, _PACKED = "float8_e4m3fn", "uint8"
# layers with block scales -> format, the op on 10.0 and 10.3, dtypes of inputs and weights, multiples
BLOCK_SCALED: dict[Kind, tuple[str, str, tuple[str, str], dict[str, int]]] = {
    Kind.FP8_BLOCK: ("fp8_block", "trtllm_fp8_block_scale_moe", (_F8, _F8), {}),
    Kind.MXFP8: ("mxfp8", "trtllm_fp8_block_scale_moe", (_F8, _F8), {"hidden": 256, "intermediate": 128}),
    Kind.NVFP4: ("nvfp4", "trtllm_fp4_block_scale_moe", (_PACKED, _PACKED), {"hidden": 256, "intermediate": 64}),
    Kind.MXFP4: ("mxfp4", "trtllm_fp4_block_scale_moe", ("bfloat16", _PACKED), {"hidden": 256, "intermediate": 128}),
}
BF16_BLOCK = 64  # columns of bfloat16 weights in one block of 128 bytes
# family -> FlashInfer's RoutingMethodType, as its trtllm-gen ops take it
ROUTING = {
    "mixtral": "renormalize",
    "qwen3_moe": "renormalize_naive",
    "gpt_oss": "renormalize",
    "deepseek_v2": "default",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
    "qwen2_moe": "renormalize_naive",
}


def _routing(part: Part, context: Context) -> tuple[tuple[int, ...], dict[str, str]]:
    """The buckets at which every expert-parallel rank has tokens, and how the inputs see to it.

    Inputs assign the (token, expert) pairs to the ranks in turn, so a rank has tokens once there are as many pairs as
    ranks; a random choice would only make that likely.
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
    moe = context.model.moe
    assert moe is not None
    extras = {"activation": moe.activation, **({"bias": "true"} if part.bias else {})}
    return OpPlan(
        name=part.name,
        op=op,
        shape=dict(vars(shape)),
        dtypes={"a": dtypes[0], "b": dtypes[1], "out": context.out_dtype},
        buckets=kept,
        options={**extras, **routing, **options},
        ranks=part.ranks,
        layers=len(part.layers),
        notes=unproven(op, context),
    )


def _cutlass_moe(part: Part, context: Context, dtypes: tuple[str, str], **options: str) -> OpPlan:
    if context.target.sm not in (89, *HOPPER_ON):
        raise NotTuned(f"cutlass_fused_moe needs compute capability 8.9, {context.target.arch} is below")
    op = _moe_op(part, context, "cutlass_fused_moe", dtypes, **options)
    if why := rank_in_key(op, context.version):
        raise NotTuned(why)
    return op


def _routing_method(context: Context) -> str:
    """The router's method as the trtllm-gen ops take it; empty where this tuner has no counterpart."""
    moe = context.model.moe
    assert moe is not None
    method = ROUTING.get(context.model.family, "")
    return "default" if method == "renormalize_naive" and not moe.renormalized else method


def _trtllm_moe(part: Part, context: Context, op: str, dtypes: tuple[str, str], **options: str) -> OpPlan:
    if context.target.sm not in TRTLLM_GEN:
        raise NotTuned(
            f"{part.scheme}: {op} has kernels for compute capability 10.0 and 10.3, not {context.target.arch}"
        )
    moe = context.model.moe
    assert moe is not None
    options["routing_method"] = _routing_method(context)
    if not options["routing_method"]:
        raise NotTuned(f"{op}: how {context.model.family} routes tokens has no counterpart in this tuner")
    if options["routing_method"] == "deepseek_v3":
        options |= {"n_group": str(moe.groups or 1), "topk_group": str(moe.top_groups or 1)}
    return _moe_op(part, context, op, dtypes, **options)


def _against_trtllm(part: Part, context: Context, op: str) -> Iterator[str]:
    """What keeps a layer without block scales from being planned as `op` on 10.0 and 10.3.

    As vLLM 0.28 and 0.33 choose (fused_moe/oracle/unquantized.py and fp8.py, experts/trtllm_bf16_moe.py and
    trtllm_fp8_moe.py).
    """
    moe, asked, bf16 = context.model.moe, context.asked, op == "trtllm_bf16_moe"
    assert moe is not None
    assert part.moe is not None
    if "cutlass_fused_moe" in asked and op not in asked:
        yield "--ops names cutlass_fused_moe in its place"
    if part.bias or moe.activation != "swiglu":
        yield f"it takes no {'bias' if part.bias else moe.activation}; vLLM runs such experts through Triton"
    if context.out_dtype != "bfloat16":
        done = "it and refuses the weights" if bf16 else "cutlass_fused_moe itself"
        yield f"{context.out_dtype}: it writes bfloat16; vLLM chooses {done}"
    method = _routing_method(context)
    if not method:
        yield f"how {context.model.family} routes tokens has no counterpart in this tuner"
    if method == "default":
        alone = " without data parallelism" if bf16 else ""
        yield f"vLLM has no such router for it, and chooses cutlass_fused_moe itself{alone}"
    if bf16 and part.moe.hidden % BF16_BLOCK:
        yield f"its weights lie in blocks of {BF16_BLOCK} columns, the hidden size is {part.moe.hidden}"


def _plain_moe(part: Part, context: Context, trtllm: str, dtype: str) -> OpPlan:
    """A layer without block scales: through trtllm-gen where vLLM chooses it, else through CUTLASS."""
    why = next(_against_trtllm(part, context, trtllm), "") if context.target.sm in TRTLLM_GEN else ""
    if why or context.target.sm not in TRTLLM_GEN:
        op = _cutlass_moe(part, context, (dtype, dtype))
        op = padded(op, "vLLM does", _FP8) if dtype == _F8 else op
        return replace(op, notes=(*op.notes, f"{trtllm} is not planned: {why}")) if why else op
    op = _trtllm_moe(part, context, trtllm, (dtype, dtype))
    if trtllm == "trtllm_bf16_moe":
        op = padded(op, "vLLM 0.33 and SGLang do (vLLM 0.28 does not, and cannot run it)", _BF16)
    else:
        op = padded(op, "vLLM does", _FP8)
    return replace(op, notes=(*op.notes, "stands for cutlass_fused_moe, which --ops cutlass_fused_moe plans instead"))


def _mxfp4_on_hopper(part: Part, context: Context) -> OpPlan:
    """As servers run gpt-oss: what they would ask for other experts has no counterpart here."""
    assert context.model.moe is not None
    if not part.bias or context.model.moe.activation != "swiglu_oai":
        raise NotTuned(
            "mxfp4: on Hopper cutlass_fused_moe is tuned as servers call it for gpt-oss, whose experts have biases and "
            "a SwiGLU of their own; these have not"
        )
    if context.out_dtype != "bfloat16":
        raise NotTuned(f"{context.out_dtype}: cutlass_fused_moe takes bfloat16 alone with mxfp4 weights")
    op = _cutlass_moe(part, context, ("bfloat16", _PACKED), format="mxfp4")
    return padded(op, "vLLM does", _MXFP4_ON_HOPPER)


def _block_scaled_moe(part: Part, context: Context) -> OpPlan:
    kind, sm = part.scheme.kind, context.target.sm
    if kind is Kind.MXFP4 and sm == HOPPER:
        return _mxfp4_on_hopper(part, context)
    if kind is Kind.FP8_BLOCK and sm not in TRTLLM_GEN:
        raise NotTuned(
            f"{part.scheme}: cutlass_fused_moe's profiling of block scales runs nothing "
            f"(all versions to {NEWEST_READ}), so its timings are meaningless"
        )
    name, trtllm, dtypes, multiples = BLOCK_SCALED[kind]
    op = _trtllm_moe(part, context, trtllm, dtypes, format=name)
    wide, hidden = padded(op, "vLLM does", multiples), op.shape["hidden"]
    if kind is not Kind.MXFP4 or wide.shape["hidden"] == hidden:
        return wide
    # vLLM (experts/trtllm_mxfp4_moe.py) and SGLang (moe_runner/flashinfer_trtllm.py) take the model's own columns
    return replace(wide, options={**wide.options, "hidden_out": str(hidden)})


def moe_op(part: Part, context: Context) -> OpPlan:
    """The op of one MoE layer; raises `NotTuned`."""
    kind = part.scheme.kind
    if part.unsupported:
        raise NotTuned(part.unsupported)
    if kind is Kind.NONE:
        if context.model.dtype not in ("bfloat16", "float16"):
            raise NotTuned(f"{context.model.dtype}: cutlass_fused_moe is tuned for bfloat16 and float16{context.cast}")
        return _plain_moe(part, context, "trtllm_bf16_moe", context.model.dtype)
    if kind is Kind.FP8_TENSOR:
        return _plain_moe(part, context, "trtllm_fp8_per_tensor_scale_moe", _F8)
    if kind in BLOCK_SCALED:
        return _block_scaled_moe(part, context)
    if kind is Kind.FP8_CHANNEL:
        other = "; trtllm_fp8_per_channel_scale_moe takes more, and no server that was read calls it"
        there = other if context.target.sm in TRTLLM_GEN else ""
        raise NotTuned(f"{part.scheme}: cutlass_fused_moe takes one scale per expert{there}")
    raise NotTuned(f"{part.scheme}: not a format of FlashInfer's tuned MoE ops")
