"""Which op of the tuner stands for a part of the model, or why none does."""

from __future__ import annotations

from pipeline.contract.plan import OpPlan, Untuned
from pipeline.flashinfer.features import BF16_ANY_COUNT, BF16_CUDNN_FOUND, TRTLLM_LAYERS_APART
from pipeline.flashinfer.gpus import BLACKWELL, HOPPER_ON

from .choice import Context, NotTuned, changed, padded, unproven
from .moe import moe_op
from .parts import Part
from .quant import Kind
from .served import served
from .target import backends

FP4_MULTIPLE = 32  # to which vLLM (utils/nvfp4_utils.py) and SGLang (modelopt_quant.py) pad nvfp4 weights
CPU_NOTE = "one expert's product: its buckets count the tokens that reach one expert"
CUDNN_BF16 = (
    f"below FlashInfer {BF16_CUDNN_FOUND.since} its entries cannot be found again: the workspace's size is in the key, "
    "and cuDNN resizes it while it is tuned"
)


def _gemm(part: Part, context: Context, op: str, dtype: str, **options: str) -> OpPlan:
    return OpPlan(
        name=part.name,
        op=op,
        shape={"n": part.n, "k": part.k},
        dtypes={"a": dtype, "b": dtype, "out": context.out_dtype},
        buckets=context.buckets,
        backends=backends(op, context.target.sm, context.backends),
        options=options,
        ranks=part.ranks,
        layers=len(part.layers),
        notes=unproven(op, context),
    )


def _mm_bf16(part: Part, context: Context) -> OpPlan:
    if context.facts.dtype != "bfloat16":
        raise NotTuned(f"{context.facts.dtype}: FlashInfer's mm_bf16 takes bfloat16 alone{context.cast}")
    op = _gemm(part, context, "mm_bf16", "bfloat16")
    names = tuple(b for b in op.backends if b != "tinygemm" or part.n % 16 == 0)
    if not names:
        raise NotTuned(f"tinygemm takes n in multiples of 16, this is {part.n}")
    if "cublaslt" not in names or BF16_ANY_COUNT.of(context.version):
        return changed(op, backends=names)
    note = (
        f"cuBLASLt entries of FlashInfer {context.version} answer exactly these token counts and none between "
        f"(the key holds the real count; fixed in {BF16_ANY_COUNT.since}): name the server's batch sizes with --buckets"
    )
    return changed(op, backends=names, options={"hits": "exact"}, notes=(*op.notes, note))


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
    if scheme.kind is Kind.NVFP4:
        op = _gemm(part, context, "mm_fp4", "uint8", format=scheme.kind.value)
        return padded(op, "vLLM and SGLang do", {"n": FP4_MULTIPLE, "k": FP4_MULTIPLE})
    _multiple(part, FP4_MULTIPLE, "block-scaled products")
    if scheme.kind is Kind.MXFP8:
        return _gemm(part, context, "mm_mxfp8", "float8_e4m3fn", format="mxfp8")
    op = _gemm(part, context, "mm_fp4", "uint8", format=scheme.kind.value)
    if "cutlass" in op.backends:
        if "mm_fp4" in context.backends:
            raise NotTuned("mxfp4: of mm_fp4's backends CUTLASS takes no blocks of 32")
        return changed(op, backends=("cudnn",))
    return op


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
        op = (_cuda_gemm if part.moe is None else moe_op)(part, context)
    except NotTuned as refusal:
        return [], [Untuned(part.name, str(refusal))]
    op = served(op, context.target.sm, layout_in_key=TRTLLM_LAYERS_APART.of(context.version))
    missing = [b for b in context.buckets if b not in op.buckets]
    if not missing:
        return [op], []
    assert part.moe is not None
    reason = f"{part.moe.top_k} experts per token leave some of {part.moe.ep} expert-parallel ranks without tokens"
    return [op], [Untuned(f"{part.name} at {', '.join(map(str, missing))} tokens", reason)]
