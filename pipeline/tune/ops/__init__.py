"""Ops: how each kind is fed, called and checked. A plan's `op` names one.

To add an op, write its file with an `OpSpec` in `SPECS`, and name it here. Files are imported when a plan names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan

if TYPE_CHECKING:
    import torch

# op → file
OPS: Mapping[str, str] = {
    "cpu_mm": "cpu_mm",
    "mm_bf16": "gemm",
    "bmm_fp8": "gemm",
    "mm_fp4": "gemm",
    "mm_mxfp8": "gemm",
    "cutlass_fused_moe": "cutlass",
    "trtllm_bf16_moe": "trtllm",
    "trtllm_fp8_per_tensor_scale_moe": "trtllm",
    "trtllm_fp8_block_scale_moe": "trtllm",
    "trtllm_fp4_block_scale_moe": "trtllm",
}


class OpUnknown(UsageError):
    """The plan names an op that this tuner does not have."""


class Case(Protocol):
    """One op of a plan, ready to be called on one rank."""

    def call(self, tokens: int) -> torch.Tensor:
        """Run the op once through FlashInfer's AutoTuner on inputs of `tokens` tokens, and return its output."""

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """How far `out` is from an upcast reference, as a multiple of the allowed error; at most 1 is right."""


@dataclass(frozen=True)
class OpSpec:
    """One kind of op.

    `custom_ops` are the names that FlashInfer's AutoTuner knows it by, `capable` the compute capabilities that it runs
    on (90 for 9.0; empty: any), `modules` FlashInfer's JitSpecs of the compiled modules that it loads.
    """

    custom_ops: tuple[str, ...]
    build: Callable[[OpPlan, torch.device, int], Case]
    modules: Callable[[OpPlan], list[Any]] = lambda _: []
    device: str = "cuda"
    capable: tuple[int, ...] = ()

    def make(self, op: OpPlan, device: torch.device, seed: int) -> Case:
        """Prepare one op of a plan on a device; raise `OpNotHere`, `DtypeUnknown`, or `TypeError` for a string."""
        from .cuda import need_capability
        from .reference import need_device

        need_device(device)
        if self.capable:
            need_capability(op, device, self.capable)
        return self.build(op, device, seed)


def spec_of(op: OpPlan) -> OpSpec:
    """The kind of an op; raise `OpUnknown`."""
    if op.op not in OPS:
        raise OpUnknown(
            f"{op.name}: there is no op {op.op!r}",
            hint=f"this tuner has {', '.join(sorted(OPS))}; make the plan again with this version",
        )
    specs: Mapping[str, OpSpec] = importlib.import_module(f"{__name__}.{OPS[op.op]}").SPECS
    return specs[op.op]
