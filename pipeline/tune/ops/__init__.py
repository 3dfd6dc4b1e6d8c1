"""Adapters: how one kind of op is fed, called and checked. A plan's `op` names one.

An adapter is a module with `CUSTOM_OPS` (the names that FlashInfer's AutoTuner knows it by), `DEVICE` (`cpu` or
`cuda`) and `make(op, device, seed) -> Case`. Adapters are imported when a plan names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan

if TYPE_CHECKING:
    import torch

_NAMES = (
    "cpu_mm", "mm_bf16", "bmm_fp8", "mm_fp4", "mm_mxfp8", "cutlass_fused_moe", "trtllm_bf16_moe",
    "trtllm_fp8_per_tensor_scale_moe", "trtllm_fp8_block_scale_moe", "trtllm_fp4_block_scale_moe",
)  # fmt: skip
ADAPTERS: Mapping[str, str] = {name: f"pipeline.tune.ops.{name}" for name in _NAMES}


class OpUnknown(UsageError):
    """The plan names an op that this tuner has no adapter for."""


class Case(Protocol):
    """One op of a plan, ready to be called on one rank."""

    def call(self, tokens: int) -> torch.Tensor:
        """Run the op once through FlashInfer's AutoTuner on inputs of `tokens` tokens, and return its output."""

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """How far `out` is from an upcast reference, as a multiple of the allowed error; at most 1 is right."""

    def tactics(self, tokens: int) -> Mapping[str, list[Any]]:
        """The tactics that each runner offers, as JSON values: what the ranks must agree on before they measure."""


class Adapter(Protocol):
    """The module of one op."""

    CUSTOM_OPS: tuple[str, ...]
    DEVICE: str

    def modules(self, op: OpPlan) -> list[Any]:
        """FlashInfer's JitSpecs of the compiled modules that the op loads."""

    def make(self, op: OpPlan, device: torch.device, seed: int) -> Case:
        """Prepare one op of a plan on a device."""


def adapter_of(op: OpPlan) -> Adapter:
    """Import the adapter of an op; raise `OpUnknown`."""
    if op.op not in ADAPTERS:
        raise OpUnknown(
            f"{op.name}: there is no op {op.op!r}",
            hint=f"this tuner has {', '.join(sorted(ADAPTERS))}; make the plan again with this version",
        )
    module: Any = importlib.import_module(ADAPTERS[op.op])
    found: Adapter = module
    return found
