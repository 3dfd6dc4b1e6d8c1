"""Choosing the bench of a device, and timing several of them in one go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from pipeline.tune.tuner import Question

from . import power
from .bench import Bench, Candidate, CpuBench, Trying
from .cold import Copies
from .graphs import GpuBench
from .rule import Round

TOGETHER = 8  # buckets that are timed in one go at most, where both states of the clock count


def copies_for(device: torch.device) -> Copies | None:
    """What the benches of one sitting share: copies of weights in other memory than those of any other sitting."""
    return Copies(device) if device.type == "cuda" else None


def bench(
    points: Sequence[Question],
    candidates: Sequence[Candidate],
    device: torch.device,
    trying: Trying,
    bucket: int,
    *,
    copies: Copies | None = None,
) -> Bench:
    """Prepare the candidates of a bucket at every point.

    Those that fail are in `failed`, with the reason, and are never timed.
    """
    if device.type == "cuda":
        shared = copies or Copies(device)
        return GpuBench(points, candidates, device, trying, shared, both=power.both_states(bucket))
    return CpuBench(points, candidates, trying)


def together(device: torch.device, buckets: Sequence[int]) -> list[Sequence[int]]:
    """Which buckets are timed in one go: alone, or evenly shared out where both states of the clock count."""
    shared = [bucket for bucket in buckets if device.type == "cuda" and power.both_states(bucket)]
    times = math.ceil(len(shared) / TOGETHER)
    ends = [len(shared) * number // max(1, times) for number in range(times + 1)]
    alone: list[Sequence[int]] = [[bucket] for bucket in buckets if bucket not in shared]
    return alone + [shared[start:end] for start, end in itertools.pairwise(ends)]


def rounds(trials: Sequence[tuple[Bench, Sequence[int]]], count: int, *, quick: bool = False) -> list[list[Round]]:
    """`count` rounds of each bench's candidates, in one go where the clock's state counts; `quick` at rest alone."""
    staged = [(one, alive) for one, alive in trials if isinstance(one, GpuBench) and one.both]
    if len(staged) == len(trials) and not quick:
        return power.rounds(staged, count, both=True)
    return [one.rounds(alive, count, quick=quick) for one, alive in trials]
