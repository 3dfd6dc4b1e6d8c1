"""Token counts of a replay, and what its ranks found, joined: the parts that need no torch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune.replay import _together, failures
from pipeline.tune.tokens import answering, replay_tokens


def test_replay_tokens_are_buckets_the_next_token_and_halfway() -> None:
    assert replay_tokens((1, 8, 32)) == [1, 2, 4, 8, 9, 20, 32, 33]
    assert replay_tokens((5,)) == [5, 6]


@given(st.sets(st.integers(1, 5000), min_size=1, max_size=12), st.integers(1, 6000), st.booleans())
def test_the_answering_bucket_is_the_nearest_below_or_above(buckets: set[int], tokens: int, round_up: bool) -> None:
    ordered = tuple(sorted(buckets))
    op = OpPlan("x", "cpu_mm", {}, {}, ordered)
    found = answering(op, Plan("m", "cpu", "cpu-x", "0", Layout(), (op,), round_up=round_up), tokens)
    fits = [b for b in ordered if (b >= tokens if round_up else b <= tokens)]
    assert found == ((fits[0] if round_up else fits[-1]) if fits else ordered[-1 if round_up else 0])


def test_findings_of_several_ranks_are_listed_once() -> None:
    miss = {"op": "x", "tokens": 1, "bucket": 1, "entry": "k"}
    joined = _together([(0, miss), (1, dict(miss)), (1, {**miss, "tokens": 2})])
    assert [(one["tokens"], one["ranks"]) for one in joined] == [(1, [0, 1]), (2, [1])]


def test_a_replay_that_called_nothing_is_a_failure() -> None:
    assert failures({"misses": [], "wrong": [], "record_differences": [], "calls": 0}) != []
