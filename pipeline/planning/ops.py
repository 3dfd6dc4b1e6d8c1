"""Which op of the tuner stands for a part of the model, or why none does."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.features import BF16_ANY_COUNT, BF16_CUDNN_FOUND
from pipeline.flashinfer.gpus import BLACKWELL, HOPPER_ON, TRTLLM_GEN
from pipeline.flashinfer.ops import BACKENDS

from .model_config import ModelConfig
from .problems import Problems
from .quantization import Kind
from .sharding import Part, pad

FP4_MULTIPLE = 32  # to which vLLM (utils/nvfp4_utils.py) and SGLang (modelopt_quant.py) pad nvfp4 weights
CPU_NOTE = "one expert's product: its buckets count the tokens that reach one expert"
# What has been measured on a GPU for this project; everything else is planned from FlashInfer's code alone.
PROVEN = {"mm_bf16": (90,), "bmm_fp8": (90,)}
# What competes unless others are asked for. cuBLAS and cuBLASLt answer both a caller that names them and one that
# says backend="auto", and need nothing beside CUDA. Of the block-scaled products the one backend that vLLM 0.28 and
# 0.33 and SGLang 0.5.23 name: an entry contains its winner's backend, so that any other winner would be a miss.
_USUAL: dict[str, tuple[str, ...]] = {"mm_bf16": ("cublaslt", "cutlass"), "bmm_fp8": ("cublas", "cutlass")}
_BLOCK_SCALED = ("mm_fp4", "mm_mxfp8")


@dataclass(frozen=True)
class Target:
    """`device` is `cpu` or `cuda`, `arch` FlashInfer's name for it (`90a`, `cpu-x86_64`)."""

    device: str
    arch: str

    @property
    def sm(self) -> int:
        """The compute capability times ten; 0 for a processor."""
        found = re.match(r"(\d+)[af]?$", self.arch)
        return int(found[1]) if found and self.device == "cuda" else 0


@dataclass(frozen=True)
class Context:
    """What the choice of an op depends on beside the part itself; `asked` is what --ops names."""

    model: ModelConfig
    target: Target
    version: str
    buckets: tuple[int, ...]
    backends: Mapping[str, Sequence[str]]
    asked: Collection[str] = ()

    @property
    def out_dtype(self) -> str:
        """The dtype that products write: the model's own, where it is one of 16 bits."""
        return self.model.dtype if self.model.dtype in ("bfloat16", "float16") else "bfloat16"

    @property
    def cast(self) -> str:
        """What servers make of a float32 checkpoint (vLLM's config/model.py, SGLang's configs/model_config.py)."""
        if self.model.dtype != "float32":
            return ""
        return "; servers cast float32, vLLM to bfloat16 and SGLang to float16: put that into config.json to plan it"


class NotTuned(Exception):
    """A part has no op here; the text is the reason that the plan states."""


def unproven(op: str, context: Context) -> tuple[str, ...]:
    """The note of an op that no GPU of this kind has run for this project."""
    if context.target.sm in PROVEN.get(op, ()):
        return ()
    return (f"unverified: planned from FlashInfer's code, {op} has not been run on such a GPU for this project",)


def padded(op: OpPlan, who: str, multiples: Mapping[str, int]) -> OpPlan:
    """`op` with the sizes to which servers pad the weights before they call it: the padding is in the op's key."""
    sizes = {name: pad(op.shape[name], multiple) for name, multiple in multiples.items()}
    different = [f"{name} {op.shape[name]} → {size}" for name, size in sizes.items() if size != op.shape[name]]
    notes = (f"padded as {who}: {', '.join(different)}",) if different else ()
    return replace(op, shape={**op.shape, **sizes}, notes=(*op.notes, *notes))


def usual_backends(op: str, sm: int) -> tuple[str, ...]:
    """The backends that compete in an op where none are asked for, those first that servers ask for."""
    if op in _BLOCK_SCALED:
        return ("cute-dsl",) if sm in TRTLLM_GEN else ("cutlass",)
    return tuple(name for name in _USUAL.get(op, ()) if sm in BACKENDS[op][name])


def check_backends(asked: Mapping[str, Sequence[str]], target: Target, version: str, problems: Problems) -> None:
    """Add to `problems` what was asked for and does not exist."""
    for op, names in asked.items():
        if op not in BACKENDS:
            problems.add(f"--backends {op}: no choice of backends there", f"known: {', '.join(BACKENDS)}")
            continue
        can = [name for name, sms in BACKENDS[op].items() if target.sm in sms]
        for name in names:
            if name not in can:
                there = f"there: {', '.join(can) or 'none'}"
                problems.add(f"--backends {op}={name} does not exist on {target.arch}", there)
            elif name == "cute-dsl" and len(names) > 1:
                problems.add(
                    f"--backends {op}={'+'.join(names)}: cute-dsl competes with no other",
                    'FlashInfer takes it only where it is named alone, backend="auto" never does',
                )
            elif op == "mm_bf16" and name == "cudnn" and not BF16_CUDNN_FOUND.of(version):
                problems.add(
                    f"--backends mm_bf16=cudnn: below FlashInfer {BF16_CUDNN_FOUND.since} its entries cannot be found "
                    "again: the workspace's size is in the key, and cuDNN resizes it while it is tuned",
                    "take cublaslt",
                )


def _gemm(part: Part, context: Context, op: str, dtype: str, **options: str) -> OpPlan:
    return OpPlan(
        name=part.name,
        op=op,
        shape={"n": part.n, "k": part.k},
        dtypes={"a": dtype, "b": dtype, "out": context.out_dtype},
        buckets=context.buckets,
        backends=tuple(context.backends.get(op) or usual_backends(op, context.target.sm)),
        options=options,
        ranks=part.ranks,
        layers=len(part.layers),
        notes=unproven(op, context),
    )


def _mm_bf16(part: Part, context: Context) -> OpPlan:
    if context.model.dtype != "bfloat16":
        raise NotTuned(f"{context.model.dtype}: FlashInfer's mm_bf16 takes bfloat16 alone{context.cast}")
    op = _gemm(part, context, "mm_bf16", "bfloat16")
    names = tuple(b for b in op.backends if b != "tinygemm" or part.n % 16 == 0)
    if not names:
        raise NotTuned(f"tinygemm takes n in multiples of 16, this is {part.n}")
    if "cublaslt" not in names or BF16_ANY_COUNT.of(context.version):
        return replace(op, backends=names)
    note = (
        f"cuBLASLt entries of FlashInfer {context.version} answer exactly these token counts and none between "
        f"(the key contains the real count; fixed in {BF16_ANY_COUNT.since}): name the server's batch sizes with "
        "--buckets"
    )
    return replace(op, backends=names, options={"hits": "exact"}, notes=(*op.notes, note))


def _multiple(part: Part, of: int, op: str) -> None:
    if part.n % of or part.k % of:
        raise NotTuned(f"{op} takes n and k in multiples of {of}, this is {part.n}×{part.k}")


_NO_OP = {
    Kind.FP8_CHANNEL: "bmm_fp8 takes one scale per tensor, and no other tuned op takes these",
    Kind.FP8_BLOCK: "FlashInfer's products with block scales (DeepGEMM, groupwise) bypass its AutoTuner",
    Kind.OTHER: "not a format of FlashInfer's tuned ops",
}


def gemm_op(part: Part, context: Context) -> OpPlan:
    """The op of one product on a GPU; raises `NotTuned`."""
    sm, scheme = context.target.sm, part.scheme
    if scheme.kind is Kind.NONE:
        return _mm_bf16(part, context)
    if why := _NO_OP.get(scheme.kind):
        raise NotTuned(f"{scheme}: {why}")
    if scheme.kind is Kind.FP8_TENSOR:
        if sm != 89 and sm not in HOPPER_ON:
            raise NotTuned(f"bmm_fp8 needs compute capability 8.9, {context.target.arch} is below")
        _multiple(part, 16, "bmm_fp8")
        return _gemm(part, context, "bmm_fp8", "float8_e4m3fn")
    if sm not in BLACKWELL:
        raise NotTuned(f"{scheme}: mm_fp4 and mm_mxfp8 need compute capability 10.0, {context.target.arch} is below")
    if scheme.kind is Kind.NVFP4:
        op = _gemm(part, context, "mm_fp4", "uint8", format=scheme.kind.value)
        return padded(op, "vLLM and SGLang do", {"n": FP4_MULTIPLE, "k": FP4_MULTIPLE})
    _multiple(part, FP4_MULTIPLE, "block-scaled products")
    if scheme.kind is Kind.MXFP8:
        return _gemm(part, context, "mm_mxfp8", "float8_e4m3fn", format="mxfp8")
    op = _gemm(part, context, "mm_fp4", "uint8", format=scheme.kind.value)
    if "cutlass" not in op.backends:
        return op
    if "mm_fp4" in context.backends:
        raise NotTuned("mxfp4: of mm_fp4's backends CUTLASS takes no blocks of 32")
    return replace(op, backends=("cudnn",))


def cpu_ops(part: Part, context: Context) -> list[OpPlan]:
    """The products of one part in float32; of a MoE layer those of one expert."""

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
