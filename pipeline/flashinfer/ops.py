"""The ops of a plan: the names that FlashInfer's AutoTuner has for them, and the backends that may compete in them.

Also which plans a leader cannot tune alone: host and ranks both refuse those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan

from .gpus import BLACKWELL, HOPPER_ON, KNOWN_SM, TRTLLM_GEN

LEADER = "leader"  # the strategy in which the first rank that holds an op measures it

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


class LeaderUnfit(UsageError):
    """Strategy `leader` was asked for, and the leader's work needs the ranks that would wait for it."""


def check_leader(strategy: str, plan: Plan) -> None:
    """Raise `LeaderUnfit` where `strategy` asks for a leader that this plan's ranks cannot wait for."""
    apart = [op.name for op in plan.ops if op.shape.get("ep", 1) > 1]
    if strategy != LEADER or (plan.layout.ep == 1 and not apart):
        return
    what = f"EP={plan.layout.ep}" if plan.layout.ep > 1 else f"{apart[0]} under expert parallelism"
    raise LeaderUnfit(
        f"--strategy leader with {what}: in an all-to-all the leader needs the other ranks, "
        "and ranks that wait for a leader time out",
        hint="use --strategy synchronized or sharded",
    )
