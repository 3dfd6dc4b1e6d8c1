"""Which rank that does not come back is inside a tactic to blame, which is to blame itself, and what is done then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.tune import again
from pipeline.tune.attempt import Attempt, Crash, read_crashes
from pipeline.tune.diagnose import diagnose
from pipeline.tune.rank import RankFailure
from pipeline.tune.steps import RankStep
from pipeline.tune.supervise import MARGIN, Crew, Nodes
from pipeline.tune.troubles import RankHung, RankState, RankStopped, RankTrouble, Situation, Stall

ONE, OTHER = (Attempt("bf16_gemm", "Runner", [number], [[16, 8]], 16) for number in (1, 2))
TIMED_OUT = RankFailure(0, "collective", 6, "all_reduce failed: timed out")


def state(rank: int, trying: Attempt | None = ONE, silent: float = 300.0, process: str = "R", **step: Any) -> RankState:
    said = RankStep(rank, 2, "", step="tuning qkv", op=1, trying=trying.fits if trying else None, **step)
    failure = TIMED_OUT if step.get("state") == "failed" else None
    return RankState(rank, said, process, silent, failure)


def given_up(rank: int = 0) -> RankState:
    """A rank whose collective timed out in the same tactic, which its step file still names."""
    return state(rank, waiting=True, state="failed")


def found(*ranks: RankState, bound: float | None = None) -> RankTrouble:
    return diagnose(Situation(ranks, bound, ops=("qkv",), patience=290.0))


def test_the_rank_inside_the_call_is_the_one_that_does_not_return() -> None:
    error = found(given_up(0), state(1), given_up(2))
    assert isinstance(error, RankHung)
    assert error.message == (
        "rank 1 made no progress at: tuning qkv, in Runner tactic [1] of bf16_gemm at 16 tokens (qkv); "
        "the other ranks waited for it"
    )
    assert error.crashes == (Crash("qkv", ONE, "did not return within 300 s on rank 1"),)
    assert error.stalls == (Stall(1, error.crashes[0], doubtful=True),)


def test_without_a_group_the_watchdog_finds_it_and_other_ranks_go_on() -> None:
    waits = state(2, None, waiting=True)
    error = found(state(0, OTHER, silent=3.0, returned=9), state(1, silent=311.0, returned=9), waits, bound=310.0)
    assert [(one.attempt, one.reason) for one in error.crashes] == [(ONE, "did not return within 311 s on rank 1")]
    assert [one.doubtful for one in error.stalls] == [False]
    assert error.message.startswith("rank 1 made no progress for 310 s at: tuning qkv, in Runner tactic [1] ")


def test_a_tactic_that_hangs_on_all_ranks_is_one_and_different_ones_are_two() -> None:
    same = found(state(0, silent=310.0), state(1, silent=310.5), bound=310.0)
    assert [one.reason for one in same.crashes] == ["did not return within 310 s on rank 0"]
    assert [(one.rank, one.doubtful) for one in same.stalls] == [(0, False), (1, False)]  # nothing says: the rank
    two = found(state(0, OTHER, silent=310.0), state(1, silent=310.5), bound=310.0)
    assert sorted(one.attempt.tactic for one in two.crashes) == [[1], [2]]
    assert [one.doubtful for one in (*two.stalls, *found(state(0, silent=310.0), bound=310.0).stalls)] == [True] * 3


@pytest.mark.parametrize(
    "ranks",
    [
        (given_up(), state(1, None)),
        (given_up(), state(1, silent=200.0)),  # it was elsewhere for most of the time that the others waited
        (state(0, None, silent=310.0), state(1, silent=310.0)),
        (given_up(), state(1), RankState(2, None)),
        (state(0), state(1)),  # nobody gave up, no bound passed
    ],
    ids=[
        "between tactics",
        "not for long enough",
        "beside a rank in none",
        "beside one that never started",
        "no clock",
    ],
)
def test_no_tactic_is_to_blame(ranks: Sequence[RankState]) -> None:
    error = found(*ranks, bound=310.0 if ranks[0].step and ranks[0].step.trying is None else None)
    assert isinstance(error, RankHung)
    assert (error.crashes, error.stalls) == ((), ())


def test_a_stopped_rank_is_stopped_whatever_it_runs() -> None:
    error = found(given_up(), state(1, process="T"))
    assert isinstance(error, RankStopped)
    assert error.crashes == ()


@pytest.mark.parametrize("timeout", [300.0, 4.0])
def test_nothing_is_taken_not_to_return_before_the_others_would_give_up(timeout: float, tmp_path: Path) -> None:
    patience = Crew(2, timeout, tmp_path).patience
    assert timeout / 2 <= patience <= timeout
    assert patience >= timeout - MARGIN


def hung(attempt: Attempt, *ranks: int, doubtful: bool) -> RankHung:
    crash = Crash("qkv", attempt, "did not return within 300 s on rank 1")
    error = RankHung("rank 1 made no progress", details=["its stack"])
    error.crashes, error.stalls = (crash,), tuple(Stall(rank, crash, doubtful) for rank in ranks)
    return error


Runs = list[tuple[Crash, ...]]


def tuned(monkeypatch: pytest.MonkeyPatch, crew: Crew, errors: Iterator[RankTrouble]) -> Runs:
    """What each run was told to leave out, when they end with `errors`, and those after well."""
    told: Runs = []

    def supervise(_crew: Crew, commands: Sequence[tuple[Sequence[str], object]]) -> None:
        words = commands[0][0]
        told.append(read_crashes(Path(words[words.index("--crashed") + 1])) if "--crashed" in words else ())
        error = next(errors, None)
        if error is not None:
            raise error

    monkeypatch.setattr(again, "supervise", supervise)
    again.until_none_crashes(crew, [], None, resume=True)
    return told


def test_tactics_that_do_not_return_are_left_out_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the second run the rank came back from others before it met the next: the tactics are to blame."""
    errors = iter([hung(ONE, 0, 1, doubtful=True), hung(OTHER, 0, 1, doubtful=False)])
    told = tuned(monkeypatch, Crew(2, 300.0, tmp_path), errors)
    assert [[one.attempt for one in run] for run in told] == [[], [ONE], [ONE, OTHER]]


def test_on_another_rank_the_next_tactic_is_to_blame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = iter([hung(ONE, 0, doubtful=True), hung(OTHER, 1, doubtful=True)])
    assert len(tuned(monkeypatch, Crew(2, 300.0, tmp_path), errors)) == 3


def test_a_rank_that_comes_back_from_nothing_is_to_blame_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = iter([hung(ONE, 1, doubtful=True), hung(OTHER, 0, 1, doubtful=True)])
    with pytest.raises(RankHung) as caught:
        tuned(monkeypatch, Crew(2, 300.0, tmp_path), errors)
    assert caught.value.message == (
        "rank 1 made no progress in a second tactic, so the rank is to blame: Runner tactic [2] of bf16_gemm at 16 "
        "tokens (qkv); before in Runner tactic [1] of bf16_gemm at 16 tokens (qkv)"
    )
    assert caught.value.details == ("its stack",)
    assert next(errors, None) is None


@pytest.mark.parametrize(
    ("attempts", "nodes"),
    [
        ([Attempt("bf16_gemm", "Runner", -1, [[16, 8]], 16)], Nodes()),
        ([ONE, ONE], Nodes()),  # it was left out already
        ([ONE], Nodes(2, 0, "h:1")),
        ([Attempt("bf16_gemm", "Runner", [n], [[16, 8]], 16) for n in range(again.RESTARTS + 1)], Nodes()),
    ],
    ids=["the default", "left out already", "several nodes", "too many"],
)
def test_the_ranks_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: Sequence[Attempt], nodes: Nodes
) -> None:
    errors = iter([hung(one, 1, doubtful=False) for one in attempts])
    with pytest.raises(RankHung, match=r"^rank 1 made no progress$"):
        tuned(monkeypatch, Crew(1, 300.0, tmp_path, nodes=nodes), errors)
    assert next(errors, None) is None
