"""The parts of the tuner that need no torch: agreement, diagnosis, steps, token counts, the joined replay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import CacheRefused, UsageError, WarmUpError
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.tune.agreement import EntryElsewhere, Held, RankResult, RanksDiffer, TacticsDiffer, agree, merge
from pipeline.tune.diagnose import diagnose
from pipeline.tune.looking import Stops
from pipeline.tune.rank import RankFailure
from pipeline.tune.replay import _together, failures
from pipeline.tune.steps import RankStep, Steps, alive, read_step, step_path
from pipeline.tune.supervise import MARGIN, START_SECONDS, Crew, _overdue
from pipeline.tune.tokens import answering, replay_tokens
from pipeline.tune.troubles import RankState, Situation


def test_agreement_names_rank_and_field_of_the_odd_one_out() -> None:
    said = [{"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 2]}, {"a": 1, "b": [1]}]
    with pytest.raises(RanksDiffer) as caught:
        agree(said, "before tuning")
    assert caught.value.message == "rank 2 differs from the others in b before tuning"
    assert caught.value.details == ("rank 2 differs in b: [1] (rank 0 has [1, 2])",)


def test_the_leader_is_named_when_it_is_the_odd_one_out() -> None:
    with pytest.raises(RanksDiffer, match="rank 0 differs from the others in a"):
        agree([{"a": 9}, {"a": 1}, {"a": 1}], "now")


def test_a_missing_field_is_a_difference() -> None:
    with pytest.raises(RanksDiffer, match="rank 1 differs from the others in b"):
        agree([{"a": 1, "b": 2}, {"a": 1}], "now")


def test_agreement_shows_the_part_that_differs() -> None:
    with pytest.raises(RanksDiffer) as caught:
        agree([{"b": {"x": 1, "y": 2}}, {"b": {"x": 1, "y": 3}}], "now")
    assert caught.value.details == ('rank 1 differs in b: {"y": 3} (rank 0 has {"y": 2})',)


def test_equal_ranks_agree() -> None:
    agree([{"a": [1, {"b": None}]}] * 4, "now")


def test_merge_takes_the_union_and_records_owners() -> None:
    both, mine = Held("R", 1), Held("R", [2, "x"])
    results = [RankResult(0, {"k": both}, {0: ["k"]}), RankResult(1, {"k": both, "m": mine}, {0: ["k"], 1: ["m"]})]
    union, owners = merge(results, [(0, 1), (1,)])
    assert union == {"k": both, "m": mine}
    assert owners == {"m": (1,)}


def test_merge_refuses_two_tactics_for_one_key() -> None:
    results = [RankResult(0, {"k": Held("R", 1)}, {0: ["k"]}), RankResult(1, {"k": Held("R", 2)}, {0: ["k"]})]
    with pytest.raises(TacticsDiffer) as caught:
        merge(results, [(0, 1)])
    assert caught.value.message == "rank 1 chose another tactic than rank 0 for k"
    assert caught.value.details == ('k: rank 0 chose ["R", 1], rank 1 chose ["R", 2]',)


def test_merge_does_not_mind_that_measured_times_differ() -> None:
    results = [RankResult(rank, {"k": Held("R", 1, ["p"], {"time_ms": 0.1 + rank})}, {0: ["k"]}) for rank in range(2)]
    assert merge(results, [(0, 1)])[1] == {}


@pytest.mark.parametrize("holders", [[(0, 1)], [(1,)]])
def test_merge_refuses_an_entry_where_the_plan_has_it_elsewhere(holders: list[tuple[int, ...]]) -> None:
    results = [RankResult(0, {"k": Held("R", 1)}, {0: ["k"]}), RankResult(1, {}, {})]
    with pytest.raises(EntryElsewhere):
        merge(results, holders)


def step(rank: int, **changes: object) -> RankStep:
    fields: dict[str, object] = {"rank": rank, "pid": 1, "started": "1", "step": "tuning x", "op": 1, "collective": 7}
    return RankStep(**{**fields, **changes})  # type: ignore[arg-type]


def waiting(rank: int, **changes: object) -> RankState:
    return RankState(rank, step(rank, waiting=True, **changes), "S", 5.0)


def test_a_signal_outranks_the_timeouts_it_causes() -> None:
    timed_out = RankFailure(0, "collective", 6, "all_reduce failed: timed out")
    states = [
        RankState(0, step(0, waiting=True), "S", failure=timed_out),
        RankState(1, step(1), "", status=-signal.SIGKILL),
    ]
    assert diagnose(Situation(states)).message == "rank 1 was ended by SIGKILL at: tuning x"


def test_a_rank_ended_by_the_launcher_is_not_the_culprit() -> None:
    states = [RankState(0, step(0), "", status=-signal.SIGTERM), RankState(1, step(1), "", status=-signal.SIGSEGV)]
    assert diagnose(Situation(states)).message.startswith("rank 1 was ended by SIGSEGV")


@pytest.mark.parametrize(
    ("status", "how"), [(-signal.SIGTERM, "was ended by SIGTERM"), (3, "ended without a word, with 3")]
)
def test_of_ranks_that_are_gone_the_first_is_named(status: int, how: str) -> None:
    ended_by_the_launcher = RankState(0, step(0), "", status=-signal.SIGTERM, place_of_end=1)
    states = [ended_by_the_launcher, RankState(1, step(1), "", status=status, place_of_end=0)]
    assert diagnose(Situation(states)).message == f"rank 1 {how} at: tuning x"


def test_a_rank_that_failed_and_could_not_say_why_is_gone() -> None:
    found = [RankState(0, step(0, state="failed")), waiting(1, collective=20)]
    error = diagnose(Situation(found, tail=("No space left on device: /tmp",)))
    assert error.message == "rank 0 ended without a word at: tuning x"
    assert "free room" in error.hint


def test_a_stopped_rank_is_named() -> None:
    assert "rank 1 is stopped" in diagnose(Situation([waiting(0), RankState(1, step(1), "T", 5.0)])).message


def test_the_rank_that_is_not_waiting_is_the_one_that_is_waited_for() -> None:
    error = diagnose(Situation([waiting(0), RankState(1, step(1), "R", 9.0), waiting(2)], bound=14.0))
    assert error.message == "rank 1 made no progress for 14 s at: tuning x; the other ranks waited for it"
    assert [state.rank for state in error.states] == [0, 1, 2]


def test_ranks_that_wait_at_different_places_are_told_apart() -> None:
    error = diagnose(Situation([waiting(0, collective=9), waiting(1, collective=4)]))
    assert error.message.startswith("rank 1 waits in its collective 4 at")


def test_ranks_that_wait_at_the_same_place() -> None:
    assert "wait for each other for 3 s" in diagnose(Situation([waiting(0), waiting(1)], bound=3.0)).message


def test_no_rank_started() -> None:
    error = diagnose(Situation([RankState(0, None), RankState(1, None)], launcher=1, tail=("no module",)))
    assert error.message == "no rank started"
    assert "no module" in error.details


@pytest.mark.parametrize(("code", "family"), [(2, UsageError), (6, WarmUpError), (7, CacheRefused)])
def test_an_expected_error_of_a_rank_keeps_its_exit_code(code: int, family: type[Exception]) -> None:
    failure = RankFailure(1, "refused", code, "no", "do this", ("why",))
    error = diagnose(Situation([waiting(0), RankState(1, step(1), "S", failure=failure)]))
    assert isinstance(error, family)
    assert (error.message, error.hint, error.details, error.exit_code) == ("rank 1: no", "do this", ("why",), code)


def test_an_error_that_every_rank_has_is_told_once() -> None:
    states = [
        RankState(rank, step(rank), "S", failure=RankFailure(rank, "refused", 6, "rank 1 differs")) for rank in (0, 1)
    ]
    assert diagnose(Situation(states)).message == "rank 1 differs"


def test_a_step_survives_in_its_file(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 3), 3)
    steps.say("tuning x", "tactic 1", op=2)
    with steps.waiting():
        inside = read_step(tmp_path, 3)
    after = read_step(tmp_path, 3)
    assert inside is not None
    assert after is not None
    assert (inside.rank, inside.pid, inside.waiting, inside.collective) == (3, os.getpid(), True, 1)
    assert (after.step, after.detail, after.op, after.waiting) == ("tuning x", "tactic 1", 2, False)
    assert alive(after)
    assert abs(time.monotonic() - after.changed) < 5
    assert inside.told() == "tuning x, tactic 1 (waiting for the other ranks)"


def test_a_collective_that_fails_stays_marked(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 0), 0)
    with pytest.raises(RuntimeError), steps.waiting():
        raise RuntimeError
    left = read_step(tmp_path, 0)
    assert left is not None
    assert left.waiting


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', "\0" * 100])
def test_what_is_no_step_is_none(tmp_path: Path, text: str) -> None:
    step_path(tmp_path, 0).write_text(text)
    assert read_step(tmp_path, 0) is None


def test_a_long_step_fits(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 0), 0)
    steps.say("ä" * 5000, "\n" * 5000)
    assert read_step(tmp_path, 0) is not None


def test_the_watchdog_minds_the_rank_that_does_not_wait(tmp_path: Path) -> None:
    crew, now = Crew(2, 5.0, tmp_path), time.monotonic()
    old = now - 5.0 - MARGIN - 1
    assert _overdue(crew, [step(0, changed=now), step(1, changed=now)], 1.0) is None
    # rank 1 still works while rank 0 has waited for long: no hang
    assert _overdue(crew, [step(0, changed=old, waiting=True), step(1, changed=now)], 1.0) is None
    assert _overdue(crew, [step(0, changed=old, waiting=True), step(1, changed=old)], 1.0) == 5.0 + MARGIN
    assert _overdue(crew, [step(0, changed=old, waiting=True), step(1, changed=now, waiting=True)], 1.0) is None
    assert _overdue(crew, [step(0, changed=old, state="done"), step(1, changed=now)], 1.0) is None


def test_the_watchdog_gives_imports_their_time(tmp_path: Path) -> None:
    crew = Crew(2, 5.0, tmp_path)
    assert _overdue(crew, [None, step(1, op=0, changed=0.0)], START_SECONDS - 1) is None
    assert _overdue(crew, [None, step(1, op=0, changed=0.0)], START_SECONDS + 1) == START_SECONDS


def test_how_long_ranks_are_stopped_is_counted_for_each_and_together() -> None:
    stops, seen = Stops(), []
    for now, first, second in [
        (100.0, "S", "T"), (110.0, "t", "T"), (120.0, "T", "R"), (130.0, "S", "S"), (140.0, "S", "T"), (145.0, "S", "T"),
    ]:  # fmt: skip
        stops.see({0: first, 1: second}, now)
        seen.append((stops.longest, stops.all_told))
    assert seen == [(0.0, 0.0), (10.0, 10.0), (10.0, 20.0), (0.0, 30.0), (0.0, 30.0), (5.0, 35.0)]


def test_compiling_for_hours_before_the_first_op_is_no_hang_while_it_says_so(tmp_path: Path) -> None:
    crew, now = Crew(2, 5.0, tmp_path), time.monotonic()
    old = now - 5.0 - MARGIN - 1
    waits = step(1, op=0, begun=True, changed=old, waiting=True)  # as does a rank that holds none of the ops
    assert _overdue(crew, [step(0, op=0, begun=True, changed=now), waits], 5400.0) is None
    assert _overdue(crew, [step(0, op=0, begun=True, changed=old), waits], 5400.0) == 5.0 + MARGIN


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


def test_findings_of_several_ranks_are_told_once() -> None:
    miss = {"op": "x", "tokens": 1, "bucket": 1, "entry": "k"}
    joined = _together([(0, miss), (1, dict(miss)), (1, {**miss, "tokens": 2})])
    assert [(one["tokens"], one["ranks"]) for one in joined] == [(1, [0, 1]), (2, [1])]


def test_a_replay_that_called_nothing_is_a_failure() -> None:
    assert failures({"misses": [], "wrong": [], "record_differences": [], "calls": 0}) != []
