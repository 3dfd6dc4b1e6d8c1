"""The decision rule of judging, on simulated times: it repeats itself, and prefers the default where it is unclear."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune.judging import rule
from pipeline.tune.judging.budget import Budget
from pipeline.tune.judging.rule import Round, centre, confirmed, judge, leading, settle
from pipeline.tune.tokens import judged_tokens

H200 = 0.004  # what one round's ratio scatters by on a GPU, relative; a CPU scatters ten times more


def rounds_of(
    truth: Mapping[int, float],
    count: int,
    noise: float,
    chance: random.Random,
    bias: Mapping[int, float] | None = None,
) -> list[Round]:
    """Rounds of candidates that truly are `truth` slower than 1 ms, with common drift and one outlier in twenty."""
    found: list[Round] = []
    for _ in range(count):
        drift = chance.gauss(0, 0.02)
        found.append({
            c: [value + (bias or {}).get(c, 0.0) + drift + chance.gauss(0, noise) * (5 if chance.random() < 0.05 else 1)]
            for c, value in truth.items()
        })  # fmt: skip
    return found


def decide(truth: Mapping[int, float], noise: float, chance: random.Random, between: float = 0.001) -> int:
    """A whole judgement as the tuner makes it, with a bias for each sitting."""

    def bias() -> dict[int, float]:
        return {c: chance.gauss(0, between) for c in truth}

    here, rounds, alive = bias(), [], dict(truth)
    while True:
        rounds += rounds_of(alive, rule.BATCH, noise, chance, here)
        verdict = judge(rounds)
        if len(rounds) >= rule.MOST or (verdict.clear and len(rounds) >= rule.LEAST):
            break
        alive = {c: value for c, value in alive.items() if c not in verdict.drop}
    sittings = [rounds]
    if verdict.chosen:
        both = {c: truth[c] for c in (0, verdict.chosen)}
        sittings += [rounds_of(both, rule.SITTING, noise, chance, bias()) for _ in range(2)]
    return settle(sittings).chosen


@pytest.mark.parametrize(("gain", "expected"), [(0.0, 0), (0.001, 0), (0.03, 1), (0.10, 1), (-0.02, 0)], ids=str)
def test_a_clear_gain_is_always_taken_and_none_never(gain: float, expected: int) -> None:
    chance = random.Random(5)
    assert {decide({0: 0.0, 1: -gain}, H200, chance) for _ in range(40)} == {expected}


@pytest.mark.parametrize("gain", [0.0, 0.003, 0.006, 0.010, 0.02, 0.05])
def test_two_decisions_differ_only_where_it_hardly_matters(gain: float) -> None:
    chance = random.Random(int(gain * 1e4))
    truth = {0: 0.0, 1: -gain, 2: -gain + 0.001, 3: 0.05}
    chosen = [decide(truth, H200, chance) for _ in range(60)]
    assert max(truth[c] for c in chosen) - min(truth[c] for c in chosen) <= 0.011


def test_over_many_kinds_of_keys_two_tunes_differ_in_few() -> None:
    chance, keys, differ, far = random.Random(11), 400, 0, 0
    for _ in range(keys):
        spread = chance.choice((0.002, 0.02, 0.06))
        truth = {0: 0.0, **{c: chance.uniform(-spread, spread) for c in range(1, chance.randint(3, 8))}}
        one, other = decide(truth, H200, chance), decide(truth, H200, chance)
        differ += one != other
        far += abs(truth[one] - truth[other]) > 0.012
    assert differ / keys <= 0.05  # a third of these keys lie on an edge on purpose
    assert far == 0


def test_nothing_is_chosen_that_is_slower_than_the_default() -> None:
    chance = random.Random(2)
    for _ in range(60):
        truth = {0: 0.0, **{c: chance.uniform(-0.01, 0.05) for c in range(1, 6)}}
        assert truth[decide(truth, 0.02, chance)] <= 0.002


def test_ties_go_to_the_default_then_to_the_first() -> None:
    chance = random.Random(3)
    assert judge(rounds_of({0: 0.0, 1: -0.001, 2: 0.0}, 60, H200, chance)).chosen == 0
    verdict = judge(rounds_of({0: 0.0, 1: -0.0495, 2: -0.05, 3: -0.05}, 60, H200, chance))
    assert (verdict.chosen, verdict.decided_by in ("tie", "faster")) == (1, True)
    assert verdict.ratio == pytest.approx(math.exp(-0.0495), abs=0.003)


def test_what_stays_unclear_is_a_tie_and_says_so() -> None:
    rounds: list[Round] = [{0: [0.0], 1: [gain]} for gain in (-0.04, 0.024) * 8]  # 0.8 % faster on average
    verdict = judge(rounds)
    assert (verdict.chosen, verdict.best, verdict.clear) == (0, 1, False)
    steady: list[Round] = [{0: [0.0], 1: [gain]} for gain in (-0.009, -0.008) * 8]
    assert (judge(steady).chosen, judge(steady).clear) == (1, True)


def test_a_candidate_that_loses_at_one_token_count_is_not_chosen() -> None:
    chance = random.Random(7)
    rounds = [
        {0: [chance.gauss(0, H200), chance.gauss(0, H200)], 1: [chance.gauss(-0.10, H200), chance.gauss(0.02, H200)]}
        for _ in range(40)
    ]
    verdict = judge(rounds)
    assert (verdict.chosen, verdict.drop) == (0, (1,))


def test_a_gain_that_one_sitting_does_not_show_is_not_taken() -> None:
    chance = random.Random(8)
    fast, slow = ({0: 0.0, 1: gain} for gain in (-0.08, 0.01))
    sittings = [rounds_of(fast, 40, H200, chance), rounds_of(slow, 24, H200, chance)]
    assert judge([one for sitting in sittings for one in sitting]).chosen == 1
    assert settle(sittings).chosen == 0


def test_a_kernel_that_is_slow_for_a_while_is_not_taken() -> None:
    chance = random.Random(9)
    rounds = rounds_of({0: 0.0, 1: -0.08}, 48, H200, chance) + rounds_of({0: 0.0, 1: 0.05}, 16, H200, chance)
    assert judge(rounds).chosen == 1
    assert not confirmed(1, [rounds])


def test_the_trimmed_mean_ignores_outliers() -> None:
    mean, error = centre([1.0] * 16 + [1000.0] * 3 + [-500.0])
    assert (mean, error) == (1.0, 0.0)
    assert centre([1.0, 2.0, 3.0])[1] == math.inf


@given(st.lists(st.floats(-1, 1), min_size=8, max_size=40))
def test_the_error_shrinks_with_repetition(values: list[float]) -> None:
    once, often = centre(values), centre(values * 4)
    assert often[0] == pytest.approx(once[0], abs=0.5)
    assert often[1] <= once[1] * 0.75 + 1e-9


@settings(max_examples=60)
@given(st.dictionaries(st.integers(1, 9), st.floats(-0.1, 0.1), max_size=6), st.integers(0, 9))
def test_the_order_of_candidates_in_a_round_decides_nothing(truth: dict[int, float], seed: int) -> None:
    rounds = rounds_of({0: 0.0, **truth}, 16, H200, random.Random(seed))
    turned = [dict(reversed(list(one.items()))) for one in rounds]
    assert judge(rounds) == judge(turned)


def test_leading_keeps_the_default_and_the_near() -> None:
    assert leading({0: 9.0, 1: 1.0, 2: 1.03, 3: 1.2, 4: 1.01}, 0.04, 2) == [0, 1, 4]


def test_every_key_has_a_reserve_and_the_total_holds() -> None:
    budget = Budget(per_key=1.0, keys=10)
    spent = []
    for _ in range(10):
        spent.append(budget.allow())
        budget.take(spent[-1])
    assert spent[0] == 4.0
    assert min(spent) == 0.5
    assert sum(spent) <= budget.total


def test_judged_token_counts_are_those_that_the_bucket_answers() -> None:
    op = OpPlan("x", "bmm_fp8", {"n": 1, "k": 1}, {}, (1, 2, 256, 512))
    down = Plan("m", "cuda", "90a", "0.6.16.post3", Layout(), (op,))
    up = Plan("m", "cuda", "90a", "0.6.16.post3", Layout(), (op,), round_up=True)
    assert judged_tokens(op, down, 256) == [256, 310, 376, 453]
    assert judged_tokens(op, up, 512) == [512, 310, 376, 453]
    assert judged_tokens(op, down, 512) == [512]
    assert judged_tokens(op, up, 1) == [1]
    assert judged_tokens(op, up, 2) == [2]
    exact = OpPlan("x", "mm_bf16", {"n": 1, "k": 1}, {}, (1, 2, 256, 512), options={"hits": "exact"})
    assert judged_tokens(exact, up, 512) == [512]
