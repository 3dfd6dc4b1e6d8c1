"""The rule that keeps a tactic, on simulated times: it repeats itself, and prefers the default where it is unclear."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune.compare.decide import Batch, decide
from pipeline.tune.tokens import compared_tokens

Times = Mapping[int, Sequence[float]]
NOISE = 0.004  # what one round's ratio scatters by on a GPU, relative


def timed(truth: Times, seed: int = 1, *, processes: int = 2, placement: float = 0.001) -> list[list[Batch]]:
    """Two batches of four rounds in each process, with common drift, and scatter between batches."""
    chance = random.Random(seed)

    def batch() -> Batch:
        offset = {c: chance.gauss(0, placement) for c in truth}
        found = []
        for _ in range(4):
            drift = chance.gauss(0, 0.02)
            found.append({c: [t + drift + offset[c] + chance.gauss(0, NOISE) for t in truth[c]] for c in truth})
        return found

    return [[batch(), batch()] for _ in range(processes)]


@pytest.mark.parametrize(("gain", "expected"), [(0.0, 0), (0.001, 0), (0.03, 1), (0.10, 1), (-0.02, 0)], ids=str)
def test_a_clear_gain_is_always_taken_and_none_never(gain: float, expected: int) -> None:
    found = {decide(timed({0: [0.0], 1: [-gain]}, seed)).chosen for seed in range(40)}
    assert found == {expected}


@pytest.mark.parametrize("gain", [0.0, 0.003, 0.006, 0.010, 0.02, 0.05])
def test_two_decisions_differ_only_where_it_hardly_matters(gain: float) -> None:
    truth = {0: [0.0], 1: [-gain], 2: [-gain + 0.001], 3: [0.05]}
    chosen = {decide(timed(truth, seed)).chosen for seed in range(60)}
    assert max(truth[c][0] for c in chosen) - min(truth[c][0] for c in chosen) <= 0.0125


@given(st.lists(st.floats(-0.01, 0.05), min_size=1, max_size=5), st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=60)
def test_nothing_is_chosen_that_is_slower_than_the_default(gains: list[float], seed: int) -> None:
    truth = {0: [0.0], **{c: [gain] for c, gain in enumerate(gains, 1)}}
    assert truth[decide(timed(truth, seed, placement=0.003)).chosen][0] <= 0.002


def test_ties_go_to_the_default_then_to_the_first() -> None:
    assert decide(timed({0: [0.0], 1: [-0.001], 2: [0.0]})).chosen == 0
    verdict = decide(timed({0: [0.0], 1: [-0.0495], 2: [-0.05], 3: [-0.05]}))
    assert (verdict.chosen, verdict.decided_by in ("tie", "faster")) == (1, True)
    assert verdict.ratio == pytest.approx(math.exp(-0.0495), abs=0.003)


def test_a_candidate_that_loses_at_one_token_count_is_not_chosen() -> None:
    assert decide(timed({0: [0.0, 0.0], 1: [-0.10, 0.02]})).chosen == 0
    assert decide(timed({0: [0.0, 0.0], 1: [-0.10, -0.02]})).chosen == 1


def test_a_gain_that_one_process_does_not_show_is_in_doubt() -> None:
    fast, slow = (timed({0: [0.0], 1: [gain]}, 3, processes=1)[0] for gain in (-0.03, 0.012))
    assert decide([fast, fast]).chosen == 1
    assert decide([fast, slow]).chosen == 0


def test_a_candidate_that_lacks_times_in_one_process_is_out() -> None:
    whole, part = timed({0: [0.0], 1: [-0.05], 2: [-0.1]}, processes=1), timed({0: [0.0], 1: [-0.05]}, 2, processes=1)
    assert decide([*whole, *part]).chosen == 1


@given(st.dictionaries(st.integers(1, 6), st.floats(-0.1, 0.1), max_size=4), st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=40)
def test_the_order_of_candidates_in_a_round_decides_nothing(truth: dict[int, float], seed: int) -> None:
    batches = timed({0: [0.0], **{c: [t] for c, t in truth.items()}}, seed)
    turned = [[[dict(reversed(list(one.items()))) for one in batch] for batch in process] for process in batches]
    assert decide(batches) == decide(turned)


def test_compared_token_counts_are_those_that_the_bucket_answers() -> None:
    op = OpPlan("x", "bmm_fp8", {"n": 1, "k": 1}, {}, (1, 2, 256, 512, 1024, 2048))
    down = Plan("m", "cuda", "90a", "0.7.4", Layout(), (op,))
    up = Plan("m", "cuda", "90a", "0.7.4", Layout(), (op,), round_up=True)
    assert compared_tokens(op, down, 256) == [256, 376, 453]  # the first as servers pad
    assert compared_tokens(op, up, 512) == [512, 376, 453]
    assert compared_tokens(op, down, 1024) == [1024, 1239]
    assert compared_tokens(op, down, 2048) == [2048]
    assert compared_tokens(op, up, 1) == [1]
    exact = OpPlan("x", "mm_bf16", {"n": 1, "k": 1}, {}, (1, 2, 256, 512), options={"hits": "exact"})
    assert compared_tokens(exact, up, 512) == [512]
