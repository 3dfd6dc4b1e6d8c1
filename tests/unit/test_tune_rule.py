"""The decision rule of judging, on simulated times: it repeats itself, and prefers the default where it is unclear."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.judging import ROUND, Key, decide, rounds_of, score
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune.judging.budget import Budget, Turn
from pipeline.tune.judging.rule import Round, centre, contenders, first_sittings, leading, settle
from pipeline.tune.judging.samples import CALLS, calls
from pipeline.tune.tokens import judged_tokens


def key_of(truth: Mapping[int, float]) -> Key:
    return Key("steady", truth, {}, dict.fromkeys(truth, 0.0))


@pytest.mark.parametrize(("gain", "expected"), [(0.0, 0), (0.001, 0), (0.03, 1), (0.10, 1), (-0.02, 0)], ids=str)
def test_a_clear_gain_is_always_taken_and_none_never(gain: float, expected: int) -> None:
    chance = random.Random(5)
    assert {decide(key_of({0: 0.0, 1: -gain}), chance) for _ in range(40)} == {expected}


@pytest.mark.parametrize("gain", [0.0, 0.003, 0.006, 0.010, 0.02, 0.05])
def test_two_decisions_differ_only_where_it_hardly_matters(gain: float) -> None:
    chance = random.Random(int(gain * 1e4))
    truth = {0: 0.0, 1: -gain, 2: -gain + 0.001, 3: 0.05}
    chosen = [decide(key_of(truth), chance) for _ in range(60)]
    assert max(truth[c] for c in chosen) - min(truth[c] for c in chosen) <= 0.011


@pytest.mark.parametrize(("kind", "flips", "far"), [("steady", 0.08, 0.0), ("placement", 0.15, 0.06)])
def test_two_simulated_tunes_differ_in_few_keys_and_by_little(kind: str, flips: float, far: float) -> None:
    found = score(kind, 80)
    assert found.flips <= flips
    assert found.far <= far
    assert found.furthest < 0.02
    assert found.worse == 0
    assert found.gained >= 0.85 * found.best


def test_nothing_is_chosen_that_is_slower_than_the_default() -> None:
    chance = random.Random(2)
    for _ in range(30):
        truth = {0: 0.0, **{c: chance.uniform(-0.01, 0.05) for c in range(1, 6)}}
        assert truth[decide(key_of(truth), chance, 0.02)] <= 0.002


def sittings_of(times: Mapping[int, float], count: int, chance: random.Random) -> list[list[Round]]:
    return [rounds_of(times, 8, ROUND, chance) for _ in range(count)]


def test_ties_go_to_the_default_then_to_the_first() -> None:
    chance = random.Random(3)
    assert settle(sittings_of({0: 0.0, 1: -0.001, 2: 0.0}, 8, chance)).chosen == 0
    verdict = settle(sittings_of({0: 0.0, 1: -0.0495, 2: -0.05, 3: -0.05}, 8, chance))
    assert (verdict.chosen, verdict.decided_by in ("tie", "faster")) == (1, True)
    assert verdict.ratio == pytest.approx(math.exp(-0.0495), abs=0.003)


def test_what_stays_unclear_is_a_tie_and_says_so() -> None:
    wild: list[list[Round]] = [[{0: [0.0], 1: [gain]}] * 8 for gain in (-0.04, 0.024) * 4]  # 0.8 % faster on average
    verdict = settle(wild)
    assert (verdict.chosen, verdict.best, verdict.clear) == (0, 1, False)
    steady: list[list[Round]] = [[{0: [0.0], 1: [gain]}] * 8 for gain in (-0.009, -0.008) * 4]
    assert (settle(steady).chosen, settle(steady).clear) == (1, True)


def test_a_candidate_that_loses_at_one_token_count_is_not_chosen() -> None:
    chance = random.Random(7)

    def sitting(second: float) -> list[Round]:
        return [{0: [chance.gauss(0, ROUND), chance.gauss(0, ROUND)],
                 1: [chance.gauss(-0.10, ROUND), chance.gauss(second, ROUND)]} for _ in range(8)]  # fmt: skip

    assert settle([sitting(0.02) for _ in range(4)]).chosen == 0
    assert contenders([sitting(0.02)]) == contenders([sitting(0.02), sitting(0.02)], processes=4) == [0]
    assert contenders([sitting(0.02), sitting(-0.10)], processes=4) == [0, 1], "slow in one process alone"


def test_what_one_process_finds_slow_is_looked_at_in_another() -> None:
    chance = random.Random(13)
    slow, fast = (rounds_of({0: 0.0, 1: gain, 2: 0.05}, 8, ROUND, chance) for gain in (0.03, -0.05))
    assert first_sittings(4) == 2 and first_sittings(1) == 1
    assert contenders([slow], processes=4) == [0]
    assert contenders([slow, fast], processes=4) == [0, 1]


def test_a_gain_that_one_sitting_in_four_does_not_show_is_in_doubt() -> None:
    chance = random.Random(8)
    fast, slow = ({0: 0.0, 1: gain} for gain in (-0.03, 0.03))
    sittings = [rounds_of(times, 24, ROUND, chance) for times in (fast, fast, fast, slow)]
    assert settle(sittings[:3]).chosen == 1
    verdict = settle(sittings)
    assert (verdict.chosen, verdict.best, verdict.clear) == (0, 1, False)


def test_a_gain_that_one_process_in_four_does_not_show_is_in_doubt() -> None:
    chance = random.Random(11)
    seats = [0, 1, 2, 3] * 3
    fast, slow = ({0: 0.0, 1: gain} for gain in (-0.03, 0.012))
    sittings = [rounds_of(slow if seat == 3 else fast, 8, ROUND, chance) for seat in seats]
    assert settle(sittings).chosen == 1  # twelve sittings, as if each told something new
    assert settle(sittings, seats).chosen == 0
    alike = [rounds_of(fast, 8, ROUND, chance) for _ in seats]
    assert settle(alike, seats).chosen == 1


def test_what_hardly_loses_in_one_process_is_heard_in_the_others() -> None:
    rounds = rounds_of({0: 0.0, 1: 0.003, 2: 0.03}, 24, 0.0, random.Random(12))
    assert contenders([rounds]) == [0]
    assert contenders([rounds], processes=4) == [0, 1]


def test_one_sitting_alone_never_leaves_the_default() -> None:
    rounds = rounds_of({0: 0.0, 1: -0.08}, 48, ROUND, random.Random(9))
    assert contenders([rounds]) == [0, 1]
    assert settle([rounds]).chosen == 0


def test_who_comes_to_the_further_sittings() -> None:
    chance = random.Random(10)
    rounds = rounds_of({0: 0.0, 1: -0.10, 2: -0.09, 3: -0.05, 4: 0.01}, 24, ROUND, chance)
    assert contenders([rounds]) == [0, 1, 2]
    assert contenders([rounds_of({0: 0.0, 1: 0.01, 2: 0.0}, 24, 0.0, chance)]) == [0]


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
    sittings = sittings_of({0: 0.0, **truth}, 5, random.Random(seed))
    turned = [[dict(reversed(list(one.items()))) for one in rounds] for rounds in sittings]
    assert settle(sittings) == settle(turned)


def test_leading_keeps_the_default_and_the_near() -> None:
    screened = {0: 9.0, 1: 1.0, 2: 1.03, 3: 1.2, 4: 1.01, 5: 1.08}
    assert leading(screened) == [0, 1, 2, 4]
    assert leading(screened, processes=4) == [0, 1, 2, 4, 5]
    assert leading({0: 9.0, **{c: 1 + c / 1000 for c in range(1, 12)}}) == list(range(9))


def test_every_bucket_has_a_reserve_and_the_total_holds() -> None:
    budget = Budget(per_bucket=1.0, buckets=10)
    spent = []
    for _ in range(10):
        spent.append(budget.allow())
        budget.take(spent[-1], short=[False, False])  # a layer of two keys per bucket
    assert spent[0] == 4.0
    assert min(spent) == 0.5
    assert sum(spent) == budget.spent == budget.total
    assert (budget.done, budget.judged, budget.allow(), budget.told()) == (10, 20, 0.0, "")
    many = Budget(per_bucket=1.0, buckets=10)
    assert many.allow(2) == 6.0  # of the ten, so that the other eight have half a second each
    many.take(6.0, 2, short=[False, True])
    assert (many.allow(8), many.judged, many.undecided) == (4.0, 2, 1)


def test_what_does_not_fit_is_not_begun_and_what_stays_undecided_is_told() -> None:
    budget = Budget(per_bucket=0.5, buckets=2)
    turn = Turn(0.0, elapsed=0.6, allowed=budget.allow())
    assert turn.allowed == 0.75
    assert turn.fits(0.15)
    assert not turn.fits(0.16)
    budget.take(0.7, short=[True])
    budget.take(0.3)
    assert budget.told().startswith("judging: 1 of 2 keys undecided within their share of 1.0 s, of which 1.0 s were")


def test_judged_token_counts_are_those_that_the_bucket_answers() -> None:
    op = OpPlan("x", "bmm_fp8", {"n": 1, "k": 1}, {}, (1, 2, 256, 512))
    down = Plan("m", "cuda", "90a", "0.6.16.post3", Layout(), (op,))
    up = Plan("m", "cuda", "90a", "0.6.16.post3", Layout(), (op,), round_up=True)
    assert judged_tokens(op, down, 256) == [256, 310, 376, 453]
    assert judged_tokens(op, up, 512) == [512, 310, 376, 453]
    assert judged_tokens(op, down, 512) == [512]
    assert judged_tokens(op, up, 1) == [1]
    assert judged_tokens(op, up, 2) == [2]
    wide = OpPlan("x", "bmm_fp8", {"n": 1, "k": 1}, {}, (8, 15, 16, 24, 2560, 3072))
    assert judged_tokens(wide, up, 3072) == [3072, 2668, 2800, 2954]  # the middle one as servers pad
    assert judged_tokens(wide, up, 15) == [15, 9, 11, 13]  # none is there
    assert judged_tokens(wide, down, 16) == [16, 18, 20, 22]
    exact = OpPlan("x", "mm_bf16", {"n": 1, "k": 1}, {}, (1, 2, 256, 512), options={"hits": "exact"})
    assert judged_tokens(exact, up, 512) == [512]


def test_how_many_calls_a_sample_holds() -> None:
    assert calls(0.01, 4) == 52  # whole turns around the copies, half a millisecond or more
    assert calls(0.01, 4, points=3) == 28
    assert calls(0.001, 1) == CALLS and calls(0.001, 9) == CALLS // 9 * 9
    assert (
        calls(0.2, 6) == 3 and calls(0.3, 6) == calls(5.0, 6) == 2
    )  # fewer than one turn: after the cache was emptied
    assert calls(5.0, 2) == 2 and calls(5.0, 1) == 1
