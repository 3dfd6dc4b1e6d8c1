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


_BETWEEN = (0.47, 0.77)  # of the way between two buckets: one that is padded, and an odd one
_LARGE, _BETWEEN_LARGE = 1024, (0.21,)  # from there on one is enough: fewer kernels compete
_PADDED = 8  # to multiples of which servers pad, and libraries offer other kernels there than right beside it


def compared_tokens(op: OpPlan, plan: Plan, bucket: int) -> list[int]:
    """The token counts at which a bucket's candidates are compared: the bucket, and one or two that it answers.

    An entry often names a place in a list that a library makes for each token count anew, so that the best at the
    bucket may be a poor choice beside it, and again another one at the multiples of eight to which servers pad. An
    exact entry answers nothing beside it.
    """
    if op.options.get("hits") == "exact":
        return [bucket]
    place = op.buckets.index(bucket)
    if plan.round_up:
        low, high = (op.buckets[place - 1] if place else 0), bucket
    else:
        low, high = bucket, op.buckets[min(place + 1, len(op.buckets) - 1)]
    beside = [low + round((high - low) * part) for part in (_BETWEEN if bucket < _LARGE else _BETWEEN_LARGE)]
    padded = _PADDED * round(beside[0] / _PADDED)
    if bucket < _LARGE and low < padded < high:
        beside[0] = padded
    return [bucket, *sorted({*beside} - {0, low, high})]


def answering(op: OpPlan, plan: Plan, tokens: int) -> int:
    """The bucket whose entry FlashInfer takes for a token count: the nearest below, or above with `round_up`.

    Clamped to the first and the last bucket.
    """
    if plan.round_up:
        return next((bucket for bucket in op.buckets if bucket >= tokens), op.buckets[-1])
    return next((bucket for bucket in reversed(op.buckets) if bucket <= tokens), op.buckets[0])
