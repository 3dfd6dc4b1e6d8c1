"""Token counts of a replay, and the bucket that answers for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeline.contract.plan import OpPlan, Plan


def replay_tokens(buckets: Sequence[int]) -> list[int]:
    """The token counts of a replay, ascending: every bucket, bucket + 1, and halfway to the next.

    Above the last bucket there is no halfway. `last + 1` is asked for too: with explicit buckets FlashInfer clamps
    it to the last bucket whichever way it rounds, in 0.6.16.post3 and in 0.7.4 (`round_to_nearest_bucket`), so the
    last bucket's entry must answer, and its tactic must be right one token above the size it was tuned at.
    """
    halfway = [(low + high) // 2 for low, high in pairwise(buckets)]
    return sorted({*buckets, *(bucket + 1 for bucket in buckets), *halfway})


def answering(op: OpPlan, plan: Plan, tokens: int) -> int:
    """The bucket whose entry FlashInfer takes for a token count: the nearest below, or above with `round_up`.

    Clamped to the first and the last bucket.
    """
    if plan.round_up:
        return next((bucket for bucket in op.buckets if bucket >= tokens), op.buckets[-1])
    return next((bucket for bucket in reversed(op.buckets) if bucket <= tokens), op.buckets[0])
