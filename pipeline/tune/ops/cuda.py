"""What GPU ops share: which GPUs and versions they run on, and which of their backends."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.features import Feature
from pipeline.tune import flashinfer_api


class OpNotHere(UsageError):
    """An op of the plan cannot be tuned on this GPU, or not soundly with this FlashInfer."""


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


def need_version(op: OpPlan, what: str, feature: Feature) -> None:
    """Refuse an op where FlashInfer lacks a feature."""
    here = flashinfer_api.version()
    if not feature.of(here):
        raise OpNotHere(
            f"{op.name}: {what}; fixed in FlashInfer {feature.since}, this is {here}", hint="make the plan again"
        )


def choose_backends(op: OpPlan, known: Iterable[str], default: str) -> tuple[str, ...]:
    """The runners that compete, in the plan's order; raise `OpNotHere` for a name that the adapter does not know."""
    names, known = op.backends or (default,), tuple(known)
    foreign = [name for name in names if name not in known]
    if foreign:
        raise OpNotHere(f"{op.name}: {op.op} has no backend {foreign[0]!r}", hint=f"it has {', '.join(known)}")
    return names


def nan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output in which everything that is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
