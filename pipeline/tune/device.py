"""Which device a rank runs on. One GPU per rank, unless sharing was asked for by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan


class TooFewGpus(UsageError):
    """There are more ranks on this host than GPUs, and sharing was not asked for."""


def take_device(plan: Plan, *, share_gpu: bool) -> torch.device:
    """This rank's device, made current. Raises `TooFewGpus`.

    The local rank is the launcher's; a launcher that sets none runs one host, where it is the rank.
    """
    if plan.device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK") or os.environ["RANK"])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    found = torch.cuda.device_count()
    if found == 0 or (ranks > found and not share_gpu):
        raise TooFewGpus(
            f"{ranks} ranks on this host, {found} GPUs visible",
            hint="make as many GPUs visible as the plan has ranks; --share-gpu lets them share, with worthless timings",
        )
    device = torch.device("cuda", local % found)
    torch.cuda.set_device(device)
    return device


def shared_note(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the manifest says where ranks shared a GPU; nothing where none did."""
    places = [(fact["host"], fact["uuid"]) for fact in facts if fact["uuid"]]
    if len(places) == len(set(places)):
        return []
    return [
        f"{len(places)} ranks shared {len(set(places))} GPU: they disturbed each other, so every time in this manifest "
        "is without meaning and the choices are no better than chance; not for use"
    ]
