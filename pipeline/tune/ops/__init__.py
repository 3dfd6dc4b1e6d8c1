"""Ops: how each kind is fed, called and checked. A plan's `op` names one.

To add an op, write its file with an `OpSpec` in `SPECS`, and name it here and in `pipeline.flashinfer.ops`, which says
what FlashInfer's AutoTuner calls it. Files are imported when a plan names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan
from pipeline.tune import hooks

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


class OpNotHere(UsageError):
    """An op of the plan cannot be tuned on this GPU, or not soundly with this FlashInfer."""


class Case(Protocol):
    """One op of a plan, ready to be called on one rank.

    One with a true `bucket_only` is compared at its bucket alone, since other token counts would say nothing more.
    """

    def call(self, tokens: int) -> torch.Tensor:
        """Run the op once through FlashInfer's AutoTuner on inputs of `tokens` tokens, and return its output."""

    def excess(self, tokens: int, out: torch.Tensor) -> float:
        """How far `out` is from an upcast reference, as a multiple of the allowed error; at most 1 is right."""


@dataclass(frozen=True)
class OpSpec:
    """One kind of op.

    `build` prepares one op of a plan on a device with a seed. `modules` are FlashInfer's JitSpecs of the compiled
    modules that it loads, `capable` the compute capabilities that it runs on (90 for 9.0; empty: any).
    """

    build: Callable[[OpPlan, torch.device, int], Case]
    modules: Callable[[OpPlan], list[Any]] = lambda _: []
    device: str = "cuda"
    capable: tuple[int, ...] = ()

    def make(self, op: OpPlan, device: torch.device, seed: int) -> Case:
        """Prepare one op of a plan on a device; raise `OpNotHere` or `DtypeUnknown`."""
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
    return hooks.changed("spec", specs[op.op], op)


def capability(device: torch.device) -> int:
    """Compute capability as one number: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return int(major) * 10 + int(minor)


def need_capability(op: OpPlan, device: torch.device, able: Collection[int]) -> None:
    """Refuse an op on a GPU that its kernels do not run on."""
    here = capability(device)
    if here not in able:
        raise OpNotHere(
            f"{op.name}: {op.op} runs on compute capability {', '.join(str(c / 10) for c in sorted(able))}, "
            f"this GPU has {here / 10}",
            hint="make the plan again for this GPU",
        )


def choose_backends(op: OpPlan, known: Iterable[str], default: str) -> tuple[str, ...]:
    """The runners that compete, in the plan's order; raise `OpNotHere` for a name that the adapter does not know."""
    names, known = op.backends or (default,), tuple(known)
    foreign = [name for name in names if name not in known]
    if foreign:
        raise OpNotHere(f"{op.name}: {op.op} has no backend {foreign[0]!r}", hint=f"it has {', '.join(known)}")
    return names
