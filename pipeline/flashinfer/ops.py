"""The ops of a plan: the names that FlashInfer's AutoTuner has for them, and the backends that may compete in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .gpus import BLACKWELL, HOPPER_ON, KNOWN_SM, TRTLLM_GEN

# adapter -> the names under which FlashInfer's AutoTuner knows what it calls
TUNED_AS: Mapping[str, tuple[str, ...]] = {
    "cpu_mm": ("cpu_mm",),
    "mm_bf16": ("bf16_gemm",),
    "bmm_fp8": ("fp8_gemm",),
    "mm_fp4": ("fp4_gemm",),
    "mm_mxfp8": ("mxfp8_gemm",),
    "cutlass_fused_moe": ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"),
    "trtllm_bf16_moe": ("flashinfer::trtllm_bf16_moe",),
    "trtllm_fp8_per_tensor_scale_moe": ("flashinfer::trtllm_fp8_per_tensor_scale_moe",),
    "trtllm_fp8_block_scale_moe": ("flashinfer::trtllm_fp8_block_scale_moe",),
    "trtllm_fp4_block_scale_moe": ("flashinfer::trtllm_fp4_block_scale_moe",),
}

# adapter -> backend -> compute capabilities, from the requirement checks of FlashInfer 0.6.16.post3
BACKENDS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "mm_bf16": {
        "cublaslt": KNOWN_SM,
        "tinygemm": HOPPER_ON,
        "cudnn": KNOWN_SM,
        "cutlass": TRTLLM_GEN,
        "tgv": TRTLLM_GEN,
    },
    "bmm_fp8": {"cublas": (89, *HOPPER_ON), "cudnn": (89, *HOPPER_ON), "cutlass": BLACKWELL},
    "mm_fp4": {"cudnn": BLACKWELL, "cutlass": BLACKWELL, "cute-dsl": TRTLLM_GEN},
    "mm_mxfp8": {"cutlass": BLACKWELL, "cudnn": BLACKWELL, "cute-dsl": TRTLLM_GEN},
}


def is_skipped(op: str, skip_ops: Collection[str]) -> bool:
    """Whether `skip_ops` leaves all of an op to its default: the adapter's name, or every name that FlashInfer has.

    An op with two names of which one is skipped is still tuned for the other.
    """
    names = TUNED_AS.get(op, ())
    return op in skip_ops or (bool(names) and set(names) <= set(skip_ops))
