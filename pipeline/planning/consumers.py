"""Which server looks an op's entries up, and how it must be started: data, and what changes it for one op.

Read in the published packages vLLM 0.28.0 and 0.33.0 (model_executor/kernels/linear/__init__.py and its scaled_mm,
nvfp4, mxfp8 and mxfp4; model_executor/layers/fused_moe/oracle and experts; model_executor/layers/utils.py;
model_executor/warmup/kernel_warmup.py) and SGLang 0.5.23 (srt/layers/quantization/fp8_utils.py, fp4_utils.py,
modelopt_quant.py, mxfp4.py; srt/layers/moe; srt/environ.py; srt/arg_groups;
srt/model_executor/runner/flashinfer_autotune.py). No server was run for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.contract.plan import OpPlan, Plan
from pipeline.flashinfer.features import TRTLLM_LAYERS_APART
from pipeline.flashinfer.gpus import BLACKWELL, HOPPER, KNOWN_SM, TRTLLM_GEN

from .ops import usual_backends

VLLM = "vLLM (0.28, 0.33)"
SGLANG = "SGLang (0.5.23)"
# The FlashInfer that each pins, by the requirements of its package
PINS = {"vLLM 0.28.0": "0.6.16.post3", "vLLM 0.33.0": "0.7.2.post1", "SGLang 0.5.23": "0.7.2"}
GEFORCE = (120, 121)


@dataclass(frozen=True)
class Lookup:
    """Whether one server looks entries up, and how it must be started for it, or why it does not."""

    found: bool
    how: str = ""

    def __str__(self) -> str:
        word = "yes" if self.found else "no"
        return f"{word}: {self.how}" if self.how else word


def _yes(how: str = "") -> Lookup:
    return Lookup(True, how)


def _no(why: str) -> Lookup:
    return Lookup(False, why)


@dataclass(frozen=True)
class Row:
    """What the servers do with one op in some formats (empty: any) on some compute capabilities."""

    op: str
    formats: tuple[str, ...]
    sms: tuple[int, ...]
    vllm: Lookup
    sglang: Lookup


_TORCH = _no("runs unquantized products through torch")
_OLD = _no("loads no tuned file below compute capability 9.0")
_CUTLASS = "--moe-backend flashinfer_cutlass"
# FlashInfer's keys contain from 0.6.18 on whether the last step is fused: SGLang's default is no, vLLM's is yes
_FUSED = "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1"
_SGLANG_CUTLASS = f"--moe-runner-backend flashinfer_cutlass and {_FUSED}"
_SGLANG_TRTLLM = "--moe-runner-backend flashinfer_trtllm"
_MODELOPT = "with a modelopt FP8 checkpoint"
_ALL_TO_ALL = "not with an all-to-all backend, where it hands over chosen experts"

ROWS = (
    Row("mm_bf16", (), KNOWN_SM, _TORCH, _TORCH),
    Row("bmm_fp8", (), (HOPPER,), _no("runs these products through CUTLASS"), _yes(_MODELOPT)),
    Row("bmm_fp8", (), BLACKWELL, _yes(), _yes(f"{_MODELOPT}, those that cublas won")),
    Row("mm_fp4", (), TRTLLM_GEN, _yes("asks for cute-dsl"), _yes("asks for cute-dsl")),
    Row("mm_fp4", (), (110, *GEFORCE), _yes("asks for cutlass"), _yes("asks for cutlass")),
    Row("mm_mxfp8", (), TRTLLM_GEN, _yes("asks for cute-dsl"), _yes("asks for cute-dsl")),
    Row("mm_mxfp8", (), (110, *GEFORCE), _yes("asks for cutlass"), _yes("asks for cutlass")),
    Row(
        "cutlass_fused_moe", ("mxfp4",), (HOPPER,), _yes(f"with {_CUTLASS} (default: Triton)"),
        _yes(f"with --moe-runner-backend flashinfer_mxfp4 and {_FUSED}; pads hidden sizes to 256, finds what is equal"),
    ),
    Row(
        "cutlass_fused_moe", ("fp8",), (HOPPER, *GEFORCE), _yes("its own choice"),
        _yes(f"with {_SGLANG_CUTLASS}, {_MODELOPT}"),
    ),
    Row(
        "cutlass_fused_moe", ("bf16",), (HOPPER,), _yes(f"with {_CUTLASS} (default: Triton)"),
        _yes(f"with {_SGLANG_CUTLASS}"),
    ),
    Row(
        "cutlass_fused_moe", ("bf16",), GEFORCE, _yes(f"its own choice without data parallelism, else {_CUTLASS}"),
        _yes(f"with {_SGLANG_CUTLASS}"),
    ),
    Row(
        "cutlass_fused_moe", (), TRTLLM_GEN, _yes(f"where it runs this op, by itself or with {_CUTLASS}"),
        _yes(f"with {_SGLANG_CUTLASS}"),
    ),
    Row("cutlass_fused_moe", (), (110,), _no("does not take this op here"), _yes(f"with {_SGLANG_CUTLASS}")),
    Row(
        "trtllm_bf16_moe", (), TRTLLM_GEN, _yes(f"its own choice; {_ALL_TO_ALL} (trtllm_bf16_routed_moe)"),
        _yes(f"with {_SGLANG_TRTLLM}, its own choice for Qwen3, GLM-4 and DeepSeek-V3; {_ALL_TO_ALL}"),
    ),
    Row(
        "trtllm_fp8_per_tensor_scale_moe", (), TRTLLM_GEN,
        _yes("its own choice, but not with TP, DP and EP together nor with an all-to-all backend"),
        _yes(f"with {_SGLANG_TRTLLM}; pads intermediate sizes to 128, finds what is equal; with an all-to-all backend "
             "it calls trtllm_fp8_per_tensor_scale_routed_moe, which has no adapter in this tuner"),
    ),
    Row(
        "trtllm_fp8_block_scale_moe", ("fp8_block",), TRTLLM_GEN, _yes(f"its own choice; {_ALL_TO_ALL}"),
        _no("its weights have another layout, which is another key"),
    ),
    Row(
        "trtllm_fp8_block_scale_moe", ("mxfp8",), TRTLLM_GEN, _yes(f"its own choice; {_ALL_TO_ALL}"),
        _yes(f"with {_SGLANG_TRTLLM}; {_ALL_TO_ALL}"),
    ),
    Row(
        "trtllm_fp4_block_scale_moe", ("nvfp4",), TRTLLM_GEN, _yes(f"its own choice; {_ALL_TO_ALL}"),
        _yes(f"with {_SGLANG_TRTLLM}; {_ALL_TO_ALL}"),
    ),
    Row(
        "trtllm_fp4_block_scale_moe", ("mxfp4",), TRTLLM_GEN, _yes(f"its own choice; {_ALL_TO_ALL}"),
        _yes("with --flashinfer-mxfp4-moe-precision bf16 (default: activations in mxfp8, another key)"),
    ),
)  # fmt: skip


def _format(op: OpPlan) -> str:
    return op.options.get("format") or ("fp8" if op.dtypes["a"] == "float8_e4m3fn" else "bf16")


def lookups(op: OpPlan, sm: int, version: str) -> dict[str, Lookup]:
    """Server → whether it looks the entries of this op up on a GPU of compute capability `sm`, times ten."""
    if op.op == "cpu_mm":
        none = _no("cpu_mm is this project's own op, for machines without a GPU: --arch h200 plans for a GPU")
        return {VLLM: none, SGLANG: none}
    if sm < HOPPER:
        return {VLLM: _OLD, SGLANG: _OLD}
    rows = (r for r in ROWS if r.op == op.op and sm in r.sms and (not r.formats or _format(op) in r.formats))
    row = next(rows, Row(op.op, (), (), _no("not known to call this op here"), _no("not known to call this op here")))
    found = {VLLM: row.vllm, SGLANG: row.sglang}
    routing = op.options.get("routing_method", "")
    if op.op in ("mm_fp4", "mm_mxfp8"):
        return {server: _of_backend(op, sm, lookup) for server, lookup in found.items()}
    if op.op.startswith("trtllm_") and routing == "default":
        found[VLLM] = _no("hands over chosen experts, not router logits, for such a router")
    if op.op in ("trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe") and routing == "renormalize":  # Mixtral's
        found[SGLANG] = _no("hands over chosen experts, or runs another op, for this model")
    if _format(op) == "fp8_block" and not TRTLLM_LAYERS_APART.of(version):
        found[SGLANG] = _no("its weights have another layout under the same key: leave this op out there (--skip-ops)")
    return found


def _of_backend(op: OpPlan, sm: int, usual: Lookup) -> Lookup:
    """Servers name one backend of a block-scaled product: of others they find only what that one won."""
    asked = "cute-dsl" if op.options.get("format") == "mxfp4" else usual_backends(op.op, sm)[0]
    if op.backends == (asked,):
        return usual
    competing = f"asks for {asked} alone, here {'+'.join(op.backends)} competes"
    return _yes(f"{competing}: finds what {asked} won") if asked in op.backends else _no(competing)


def with_consumers(op: OpPlan, sm: int, version: str) -> OpPlan:
    """`op` with a note for each server, or with the reasons in `unserved` where none looks its entries up."""
    found = lookups(op, sm, version)
    if any(lookup.found for lookup in found.values()):
        notes = tuple(f"{server}: {lookup}" for server, lookup in found.items())
        return replace(op, notes=(*op.notes, *notes))
    reasons: dict[str, list[str]] = {}
    for server, lookup in found.items():
        reasons.setdefault(lookup.how, []).append(server)
    return replace(op, unserved="; ".join(f"{' and '.join(names)}: {why}" for why, names in reasons.items()))


def found_by_none(ops: Sequence[OpPlan]) -> tuple[str, ...]:
    """The reasons why no server gains by any of these ops; empty where one may."""
    if not ops or any(not op.unserved for op in ops):
        return ()
    return tuple(dict.fromkeys(op.unserved for op in ops))


def who_loads(version: str) -> str:
    """Which servers run this FlashInfer: the others load no file of it, whatever they would look up."""
    pins = ", ".join(f"{server} pins {pin}" for server, pin in PINS.items())
    runs = [server for server, pin in PINS.items() if pin == version]
    which = f"{' and '.join(runs)}" if runs else "none of those that were read"
    return (
        f"a server loads only files of the FlashInfer that it runs. {version} is run by {which} ({pins}). To tune for "
        "another, plan with --flashinfer-version and build on that server's image (BASE_IMAGE, ACCEPT_BASE_VERSIONS=1)"
    )


def summary(plan: Plan, sm: int) -> Iterator[str]:
    """One line for each server: how many of the plan's ops it looks up."""
    found = [lookups(op, sm, plan.flashinfer_version) for op in plan.ops]
    for server in (VLLM, SGLANG):
        names = [op.name for op, its in zip(plan.ops, found, strict=True) if its[server].found]
        yield f"looked up by {server}: {', '.join(names) or 'none'}"
