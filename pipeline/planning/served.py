"""Which serving engine looks an op's entries up: what the plan can say of it without knowing the engine.

Read in the published packages vLLM 0.28.0 and 0.33.0 (model_executor/kernels/linear/__init__.py and its scaled_mm,
nvfp4, mxfp8 and mxfp4; model_executor/layers/fused_moe/oracle and experts; model_executor/layers/utils.py;
model_executor/warmup/kernel_warmup.py) and SGLang 0.5.23 (srt/layers/quantization/fp8_utils.py, fp4_utils.py,
modelopt_quant.py, mxfp4.py; srt/layers/moe; srt/environ.py; srt/arg_groups;
srt/model_executor/runner/flashinfer_autotune.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.gpus import TRTLLM_GEN

from .target import usual_backends

VLLM = "vLLM (0.28, 0.33)"
SGLANG = "SGLang (0.5.23)"
# The FlashInfer that each pins, by the requirements of its package
_PINS = (("vLLM 0.28.0", "0.6.16.post3"), ("vLLM 0.33.0", "0.7.2.post1"), ("SGLang 0.5.23", "0.7.2"))
_BELOW_HOPPER = f"{VLLM} and {SGLANG} load none below compute capability 9.0"
_BF16 = f"{VLLM} and {SGLANG} run unquantized products through torch"
_CUTLASS = "with --moe-backend flashinfer_cutlass"
# FlashInfer's keys hold whether the last step is fused, from 0.6.18 on; SGLang 0.5.23 says no unless it is told
_FUSED_SGLANG = "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1"
_CUTLASS_SGLANG = f"{SGLANG} with --moe-runner-backend flashinfer_cutlass and {_FUSED_SGLANG}"
_TRTLLM_SGLANG = "with --moe-runner-backend flashinfer_trtllm"
_CHOSEN = "; with an all-to-all backend they hand it chosen experts, and find no entry of these"


def found_by_none(ops: Sequence[OpPlan]) -> str:
    """What is to be said of a plan whose every op no server looks up, with the reasons; empty otherwise."""
    reasons = dict.fromkeys(op.unserved for op in ops)
    if not reasons or "" in reasons:
        return ""
    return f"no entry of this plan is looked up by a server, only by callers of FlashInfer itself: {'; '.join(reasons)}"


def who_loads(version: str) -> str:
    """Which servers run this FlashInfer: the others load no file of it, whatever they would look up."""
    pins = ", ".join(f"{server} pins {pin}" for server, pin in _PINS)
    return (
        f"a server loads only files of the FlashInfer that it runs, here {version}: {pins}; to tune for another, "
        "plan with --flashinfer-version and build on that server's image (BASE_IMAGE, ACCEPT_BASE_VERSIONS=1)"
    )


def _cutlass_moe(op: OpPlan, sm: int) -> str:
    if sm in TRTLLM_GEN:  # whether it does by itself stands in the note about the op of trtllm-gen
        return f"{VLLM} finds these entries where it runs this op, by itself or {_CUTLASS}; {_CUTLASS_SGLANG}"
    if sm == 110:
        return f"{VLLM} does not take this op on compute capability 11.0; {_CUTLASS_SGLANG} finds the entries"
    if op.options.get("format") == "mxfp4":
        sglang = f"{SGLANG} with --moe-runner-backend flashinfer_mxfp4 pads hidden sizes to 256, and finds these"
        return (
            f"{VLLM} finds these entries {_CUTLASS} (its choice here is Triton); {sglang} where that comes to the same "
            f"and {_FUSED_SGLANG} is set"
        )
    if op.dtypes["a"] != "float8_e4m3fn":
        usual = "its choice here is Triton" if sm == 90 else "which it chooses itself without data parallelism"
        return f"{VLLM} finds these entries {_CUTLASS} ({usual}), {_CUTLASS_SGLANG}"
    return f"{VLLM} chooses this op itself; {_CUTLASS_SGLANG} and a modelopt checkpoint"


def _plain_trtllm_moe(op: OpPlan) -> str:
    """bfloat16, and fp8 per tensor: SGLang asks with logits only where its model names a routing method."""
    unnamed = op.options["routing_method"] == "renormalize"  # Mixtral's
    if op.op == "trtllm_bf16_moe":
        sglang = f"{_TRTLLM_SGLANG} (its own choice for Qwen3, GLM-4 and DeepSeek-V3 models)"
        if unnamed:
            sglang = f"{_TRTLLM_SGLANG} hands it chosen experts for this model, and finds none"
        routed = f"{_CHOSEN} (trtllm_bf16_routed_moe: the same name, another key)"
        return f"{VLLM} chooses this op itself; {SGLANG} {sglang}{routed}"
    sglang = f"{_TRTLLM_SGLANG} pads intermediate sizes to 128, and finds these where that comes to the same"
    if unnamed:
        sglang = "asks for no tuned op for this model with a modelopt checkpoint, and finds none"
    routed = (
        "with an all-to-all backend vLLM does not take this op, and SGLang calls "
        "trtllm_fp8_per_tensor_scale_routed_moe (FlashInfer 0.6.17 on), which has no adapter in this tuner"
    )
    return f"{VLLM} chooses this op itself, but not with TP, DP and EP together; {SGLANG} {sglang}; {routed}"


def _trtllm_moe(op: OpPlan, *, layout_in_key: bool) -> str:
    if op.op in ("trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe"):
        return _plain_trtllm_moe(op)
    kind = op.options["format"]
    usual = f"{VLLM} chooses this op itself, {SGLANG} {_TRTLLM_SGLANG}"
    if op.options["routing_method"] == "default":
        return f"{VLLM} hands this op chosen experts, not router logits, for such a router: it finds no entry of these"
    if kind == "fp8_block":
        found = " under the same key: leave this op out there (--skip-ops), or tune with ENGINE="
        other = f"lays them out otherwise{', which is another key: it finds none' if layout_in_key else found}"
        return (
            f"{VLLM} chooses this op itself, and its weights are laid out as they are tuned here{_CHOSEN}; "
            f"{SGLANG} {other}"
        )
    if kind == "mxfp4":
        sglang = f"{SGLANG} with --flashinfer-mxfp4-moe-precision bf16 (else it asks with activations in mxfp8)"
        return f"{VLLM} chooses this op itself{_CHOSEN}; {sglang}"
    return usual + _CHOSEN


def _bmm_fp8(sm: int) -> str:
    if sm == 90:
        return (
            f"{SGLANG} finds these entries with a modelopt FP8 checkpoint; {VLLM} runs such products through CUTLASS "
            "here and finds none"
        )
    return f"{VLLM} finds these entries; {SGLANG}, with a modelopt FP8 checkpoint, those that cublas won"


def _block_scaled(op: OpPlan, sm: int) -> str:
    backend = "cute-dsl" if op.options.get("format") == "mxfp4" else usual_backends(op.op, sm)[0]
    if op.backends != (backend,):
        rest = "they find only what it won" if backend in op.backends else "they find no entry of these"
        return f"{VLLM} and {SGLANG} ask for the backend {backend} alone, here {'+'.join(op.backends)} competes: {rest}"
    return f"{VLLM} and {SGLANG} ask for the backend {backend}, and find its entries"


def served(op: OpPlan, sm: int, *, layout_in_key: bool) -> OpPlan:
    """`op` with what is known of its entries on this GPU: why no server looks them up, or a note which one does.

    `layout_in_key`: this FlashInfer's trtllm-gen MoE keys hold the layout of the weights.
    """
    reason = _BELOW_HOPPER if sm < 90 else _BF16 if op.op == "mm_bf16" else ""
    if reason:
        return replace(op, unserved=reason)
    return replace(op, notes=(*op.notes, _who_finds(op, sm, layout_in_key=layout_in_key)))


def _who_finds(op: OpPlan, sm: int, *, layout_in_key: bool) -> str:
    """One line: which server, started how, looks these entries up on this GPU."""
    if op.op == "bmm_fp8":
        return _bmm_fp8(sm)
    if op.op == "cutlass_fused_moe":
        return _cutlass_moe(op, sm)
    if op.op.startswith("trtllm_"):
        return _trtllm_moe(op, layout_in_key=layout_in_key)
    return _block_scaled(op, sm)
