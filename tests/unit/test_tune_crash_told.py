"""Which end of a rank counts as a tactic's doing, what is told of it, and what is kept of an interrupted tuning."""

from __future__ import annotations

import argparse
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.contract.commandline import Parser, budget, seconds
from pipeline.contract.errors import UsageError
from pipeline.image.request import add_build_options, add_model, request_from
from pipeline.image.runners import Unfinished
from pipeline.tune.arguments import parser as tuner_parser
from pipeline.tune.attempt import Attempt, Crash, read_crashes, write_crashes
from pipeline.tune.diagnose import diagnose
from pipeline.tune.rank import RankFailure
from pipeline.tune.steps import RankStep, Steps, read_step, step_path
from pipeline.tune.troubles import RankCrashed, RankLost, RankState, Situation

ATTEMPT = Attempt("bf16_gemm", "Runner", [1, "x"], [[16, 8], [4, 8]], 16)


def state(status: int | None, *, trying: bool = True, failure: RankFailure | None = None) -> RankState:
    step = RankStep(1, 2, "", step="tuning qkv", op=1, trying=ATTEMPT.fits if trying else None)
    return RankState(1, step, "", 1.0, failure, status)


@pytest.mark.parametrize("status", [-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 3, 134])
def test_who_ends_by_itself_in_a_tactic_was_ended_by_it(status: int) -> None:
    error = diagnose(Situation([state(status)], ops=("qkv",)))
    assert isinstance(error, RankCrashed)
    (crash,) = error.crashes
    assert (crash.op, crash.attempt) == ("qkv", ATTEMPT)
    assert error.message.startswith("a tactic ended its rank: Runner tactic [1, 'x'] of bf16_gemm at 16 tokens (qkv): ")
    row = crash.blocked()
    assert (row["op"], row["bucket"], row["runner"], row["tactic"]) == ("qkv", 16, "Runner", [1, "x"])


def test_all_tactics_of_a_call_that_ended_are_left_out_and_no_default_is_blamed_beside_one() -> None:
    """The two products of a MoE layer are looked up before either runs."""
    first, default = replace(ATTEMPT, custom_op="gemm1"), replace(ATTEMPT, custom_op="gemm2", tactic=-1)
    second = replace(ATTEMPT, custom_op="gemm2", tactic=7)
    for last, blamed in ((default, ["gemm1"]), (second, ["gemm2", "gemm1"])):
        whole = state(-signal.SIGSEGV)
        assert whole.step is not None
        step = replace(whole.step, trying=replace(last, also=[asdict(first)]).fits)
        error = diagnose(Situation([replace(whole, step=step)], ops=("qkv",)))
        assert [one.attempt.custom_op for one in error.crashes] == blamed


@pytest.mark.parametrize(
    "lost",
    [state(-signal.SIGKILL), state(-signal.SIGTERM), state(None), state(-signal.SIGSEGV, trying=False)],
    ids=["killed", "told to end", "nobody saw", "between tactics"],
)
def test_any_other_end_blames_no_tactic(lost: RankState) -> None:
    assert isinstance(diagnose(Situation([lost], ops=("qkv",))), RankLost)


def test_a_launcher_that_is_killed_is_named_and_not_the_ranks_that_ended_with_it() -> None:
    error = diagnose(Situation([state(None), state(None)], launcher=-signal.SIGKILL, ops=("qkv",)))
    assert isinstance(error, RankLost)
    assert error.message == "the launcher of the ranks was ended by SIGKILL at: tuning qkv"


def test_a_lost_gpu_names_the_tactic_that_took_it() -> None:
    failure = RankFailure(1, "device", 6, "AcceleratorError: illegal access")
    error = diagnose(Situation([state(None, failure=failure)], ops=("qkv",)))
    assert isinstance(error, RankCrashed)
    assert error.crashes[0].reason == "the GPU of rank 1 takes no more work: AcceleratorError: illegal access"


def test_what_was_tried_survives_in_the_step_file_until_something_else_is_said(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 0), 0)
    steps.attempt(ATTEMPT, "words")
    found = read_step(tmp_path, 0)
    assert found is not None
    assert found.trying is not None
    assert (Attempt(**found.trying), found.detail) == (ATTEMPT, "words")
    steps.say("something else")
    found = read_step(tmp_path, 0)
    assert found is not None
    assert found.trying is None
    huge = Attempt("op", "Runner", "x" * 5000, [], 1)
    steps.attempt(huge)  # has no room: then no tactic can be named, and nothing breaks
    found = read_step(tmp_path, 0)
    assert found is not None
    assert found.trying is None


def test_tactics_that_came_back_are_counted_defaults_and_answers_apart(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 0), 0)
    default, answer = replace(ATTEMPT, tactic=-1), replace(ATTEMPT, entry="key")
    for one in (ATTEMPT, default, answer, ATTEMPT):
        steps.attempt(one)
    assert steps.now.returned == 1  # the last one is still out
    steps.attempt(None)
    steps.attempt(None)
    assert steps.now.returned == 2


def test_crashes_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    crashes = (Crash("qkv", ATTEMPT, "rank 1 was ended by SIGSEGV"),)
    assert read_crashes(write_crashes(tmp_path / "crashed.json", crashes)) == crashes
    assert read_crashes(None) == ()
    same = Attempt("bf16_gemm", "Runner", (1, "x"), ((16, 8), (4, 8)), 16, "elsewhere")
    assert same.identity == ATTEMPT.identity


def asked(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_model(parser)
    add_build_options(parser)
    return parser.parse_args(["tiny", *words])


def test_a_resumed_tuning_is_what_happens_unless_it_is_refused() -> None:
    assert request_from(asked()).resume
    assert not request_from(asked("--no-resume")).resume
    assert request_from(asked("--no-resume")).tune_options == request_from(asked()).tune_options  # one inputs digest
    assert "--compare-budget" in request_from(asked("--compare-budget", "2")).tune_options


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e9", "two"])
def test_a_budget_is_some_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds"):
        budget(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "86401", "1e3", "nan", "١", "9" * 5000])
def test_a_bound_is_some_whole_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds from 1 to 86400"):
        seconds(text)


@pytest.mark.parametrize(
    ("option", "value", "fine"),
    [
        ("--timeout", "1", True), ("--timeout", "86400", True), ("--timeout", "0.5", False), ("--timeout", "86401", False),
        ("--compare-budget", "0.0001", True), ("--compare-budget", "3600", True), ("--compare-budget", "0", False),
        ("--compare-budget", "3601", False),
    ],
)  # fmt: skip
def test_host_and_ranks_take_the_same(option: str, value: str, fine: bool) -> None:
    said = set()
    for take in (asked, lambda *words: tuner_parser().parse_args(["plan.json", "out", *words])):
        try:
            taken = vars(take(option, value))
        except UsageError as error:
            said.add(error.message.partition(": ")[2])
        else:
            said.add(str(taken[option[2:].replace("-", "_")]))
    (one,) = said
    assert one.startswith(f"'{value}' is not a number of seconds ") != fine


def test_what_is_kept_of_a_tuning_is_dropped_when_starting_anew(tmp_path: Path) -> None:
    place = tmp_path / "unfinished" / ("a" * 64)
    kept = Unfinished(place)
    (kept.folder() / "op.json").write_text("{}")
    assert [path.name for path in kept.folder().iterdir()] == ["op.json"]
    assert kept.options() == ()
    anew = Unfinished(place, anew=True)
    assert (list(anew.folder().iterdir()), anew.options()) == ([], ("--no-resume",))
    anew.drop()
    assert not place.exists()
