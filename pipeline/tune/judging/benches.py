"""Choosing the bench of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.tune.tuner import Question

from .bench import Bench, Candidate, CpuBench, Trying
from .graphs import GpuBench
from .power import both_states


def bench(
    points: Sequence[Question], candidates: Sequence[Candidate], device: torch.device, trying: Trying, bucket: int
) -> Bench:
    """Prepare the candidates of a bucket at every point.

    Those that fail are in `failed`, with the reason, and are never timed.
    """
    if device.type == "cuda":
        return GpuBench(points, candidates, device, trying, both=both_states(bucket))
    return CpuBench(points, candidates, trying)
