"""Judging and proving in real ranks: the default is an entry like any other, a wrong tactic is replaced and named."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, write_plan

from pipeline.contract.manifest import Manifest
from pipeline.contract.plan import Plan

pytestmark = pytest.mark.flashinfer

ON = ("--judge", "on", "--judge-budget", "20")  # enough for a busy machine
Place = tuple[Manifest, dict[str, Any]]


@pytest.fixture
def plan(make_plan: Callable[..., Plan], tmp_path: Path) -> Path:
    whole = make_plan()
    return write_plan(replace(whole, ops=(replace(whole.ops[1], buckets=(1, 16)),)), tmp_path / "plan.json")


def read(root: Path) -> Place:
    (place,) = root.glob("*/*/*")
    manifest = Manifest.from_json(json.loads((place / "manifest.json").read_text()))
    return manifest, json.loads((place / "autotune_configs.json").read_text())


def test_judging_keeps_its_times_and_reasons(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert manifest.options["judge"] == "on"
    for row in manifest.covered:
        assert row.default_ms is not None
        assert row.default_ms > 0
        assert row.ratio is not None
        assert row.decided_by in ("default", "faster", "tie")
        assert (row.tactic == -1) == (row.ratio == 1.0), row
        assert row.ratio <= 1.0, row


def test_a_default_that_wins_is_an_entry_that_hits(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="default_wins", rank="*")
    assert done.status == 0, done.stderr
    manifest, file = read(tmp_path / "out")
    assert [row.tactic for row in manifest.covered] == [-1, -1]
    assert [file[row.entry][:2] for row in manifest.covered] == [["CpuWholeRunner", -1]] * 2
    replayed = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert replayed.status == 0, replayed.stderr
    assert replayed.told["hits"] == replayed.told["calls"] > 0


@pytest.mark.parametrize("fault", ["judged_together", "no_memory_together", "as_on_a_gpu"])
def test_several_keys_are_judged_in_one_hearing(tuner: Tuner, plan: Path, tmp_path: Path, fault: str) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, "--jurors", "1", fault=fault, rank="*", warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert {row.decided_by for row in manifest.covered} <= {"default", "faster", "tie"}, manifest.covered
    assert all(row.default_ms for row in manifest.covered)
    assert not manifest.notes
    log = done.stderr
    assert ("at 1, 16 tokens" in log, "at 16 tokens" in log) == (True, fault == "no_memory_together")


def test_what_no_time_was_left_for_is_settled_by_rule_and_said(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", "--judge", "on", "--judge-budget", "0.0001")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert [(row.tactic, row.decided_by) for row in manifest.covered] == [(-1, "default")] * 2
    assert all("undecided after" in row.note for row in manifest.covered)
    assert any(note.startswith("judging: 2 of 2 keys undecided within their share of 0.0 s") for note in manifest.notes)


def test_jurors_hold_sittings_in_processes_of_their_own(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, "--jurors", "1", warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert manifest.options["jurors"] == 1
    assert not [note for note in manifest.notes if "juror" in note]


def test_judging_goes_on_without_a_juror_that_ends(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, "--jurors", "1", fault="juror_dies", warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    (note,) = (note for note in manifest.notes if "juror" in note)
    assert note.startswith("judging went on without juror 1: on rank")
    assert note.endswith("it did not start: its process ended")


@pytest.mark.once
def test_a_juror_that_says_something_else_is_left_out_and_its_rank_named(
    tuner: Tuner, plan: Path, tmp_path: Path
) -> None:
    words = (*ON, "--jurors", "1", "--strategy", "sharded")
    fault = "juror_leaves_a_key_out"
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *words, fault=fault, warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert manifest.notes == ("judging went on without juror 1: on rank 1: it said something else",)


def sittings_by_bucket(tuner: Tuner, make_plan: Callable[..., Plan], place: Path, fault: str) -> dict[int, list[str]]:
    """Of each bucket what its row says, but how long five sittings took: who had none, and whose process each was in."""
    whole = make_plan()
    plan = write_plan(replace(whole, ops=(replace(whole.ops[1], buckets=(1, 8, 16)),)), place / "plan.json")
    done = tuner.run("pipeline.tune", plan, place / "out", *ON, "--jurors", "1", fault=fault, rank="*", warm=False)
    assert done.status == 0, done.stderr
    manifest, _ = read(place / "out")
    assert not manifest.notes
    chosen = {row.bucket: row.decided_by for row in manifest.covered}
    assert all((row.decided_by, row.failed) == ("default", 1) for row in manifest.covered if "tactic" in row.note), (
        chosen
    )
    return {
        row.bucket: [part for part in row.note.split("; ") if "40 rounds in 5 sittings" not in part]
        for row in manifest.covered
    }


def test_a_candidate_that_fails_in_a_juror_cannot_be_chosen_and_costs_its_key_alone(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    found = sittings_by_bucket(tuner, make_plan, tmp_path, "juror_cannot_run_a_candidate")
    assert re.fullmatch(r"no sitting in juror 1: on rank 1: Cpu\w+ tactic .+: RuntimeError: planted", found[16].pop(0))
    assert found == {1: ["seats [0, 1, 0, 1, 0]"], 8: ["seats [0, 1, 0, 1, 0]"], 16: ["seats [0]"]}


def test_keys_for_which_the_jurors_of_different_ranks_have_no_memory_go_on_without_them(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    assert sittings_by_bucket(tuner, make_plan, tmp_path, "jurors_have_no_memory_for_two_keys") == {
        1: ["no sitting in juror 1: on rank 0: MemoryError: planted", "seats [0, 0, 0, 0, 0]"],
        8: ["seats [0, 1, 0, 1, 0]"],
        16: ["no sitting in juror 1: on rank 1: MemoryError: planted", "seats [0, 0, 0, 0, 0]"],
    }


@pytest.mark.once
def test_ranks_that_judged_different_ops_before_agree_on_what_a_bench_takes(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    wide, narrow = make_plan().ops
    ops = (replace(wide, buckets=(1,), ranks=(0,)), narrow)
    plan = write_plan(make_plan(ops=ops), tmp_path / "plan.json")
    words = ("--judge", "on", "--judge-budget", "1", "--timeout", "30")
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *words, fault="slow_bench_of_wide", rank="*")
    assert done.status == 0, done.stderr


@pytest.mark.once
def test_a_juror_that_is_lost_is_started_again_before_the_next_op_and_once(tuner: Tuner, tmp_path: Path) -> None:
    words = [tuner.python, str(Path(__file__).with_name("jury_sample.py")), str(tmp_path)]
    done = subprocess.run(words, env=tuner.environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("bounds of a release") == 1
    sat, late, else_ = [[[{"0": [0.0], "1": [1.0]}], "", 0]], "no answer within 3 s", "it said something else"
    without, again = "judging went on without juror 1: ", "juror 1 was started again"
    assert told == {
        "works": {"sittings": [sat, sat, sat], "notes": [], "starts": 1},
        "declines": {"sittings": [[[[], "no memory", 0]]] * 3, "notes": [], "starts": 1},
        "hangs works": {
            "sittings": [late, sat, sat], "notes": [f"{without}on rank 0: {late}", again], "starts": 2,
        },
        **{
            f"{how} works": {
                "sittings": [else_, sat, sat], "notes": [f"{without}on rank 0: {else_}", again], "starts": 2,
            } for how in ("mumbles", "babbles", "stutters")
        },
        "hangs hangs works": {
            "sittings": [late, late, "none"], "notes": [f"{without}on rank 0: {late}", again, f"{without}on rank 0: {late}"],
            "starts": 2,
        },
        "hangs ends works": {
            "sittings": [late, "none", "none"],
            "notes": [f"{without}on rank 0: {late}", f"{without}it did not start again: its process ended"], "starts": 2,
        },
        "ends works": {
            "sittings": ["none", "none", "none"], "notes": [f"{without}its process ended"], "starts": 1,
        },
    }  # fmt: skip


@pytest.mark.once
def test_ranks_stay_in_step_whatever_fails_in_which_of_their_jurors(tuner: Tuner) -> None:
    words = [tuner.python, str(Path(__file__).with_name("hearing_sample.py")), "80"]
    done = subprocess.run(words, env=tuner.environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    happened = {"clear", "stopped", "short", "error", "all sittings", "a juror declined"}
    assert json.loads(done.stdout).keys() == happened | {
        "all jurors declined a key",
        "jurors of different ranks declined",
    }


def test_a_juror_answers_what_it_is_asked_and_ends_with_its_rank(tuner: Tuner, plan: Path) -> None:
    one, other = ({"key": [0, bucket, 0], "candidates": [[0, -1], [0, -1]]} for bucket in (1, 16))
    sitting, fewer = {"keys": [one, other], "rounds": 3}, {"keys": [other], "rounds": 3}
    wrong = {"keys": [{**one, "candidates": [[0, -1], [0, "no such"]]}, other, {**one, "key": [0, 1, 9]}], "rounds": 3}
    ready, *answers = asked(tuner, plan, (sitting, fewer, wrong, {"release": True}, sitting, {}))
    assert ready == {"ready": True}
    assert answers[3] == {"release": True}
    assert answers[5] == {"error": "KeyError: 'keys'"}
    heard = [*answers[0]["heard"], *answers[1]["heard"], answers[2]["heard"][1], *answers[4]["heard"]]
    assert [[len(one) for one in mine["rounds"]] for mine in heard] == [[2, 2, 2]] * 6
    assert all(isinstance(times[0], float) for mine in heard for one in mine["rounds"] for times in one)
    first, _, last = answers[2]["heard"]
    assert first["error"].startswith("CpuWholeRunner tactic no such: ")
    assert first["failed"] == 1
    assert last == {"error": "KeyError: (0, 1, 9)"}


@pytest.mark.once
def test_a_juror_times_keys_alone_where_one_of_them_cannot_be_timed(tuner: Tuner, plan: Path) -> None:
    keys = [{"key": [0, bucket, 0], "candidates": [[0, -1]]} for bucket in (16, 1)]
    _, answer = asked(tuner, plan, ({"keys": keys, "rounds": 3},), "rounds_fail_at_16")
    failed, timed = answer["heard"]
    assert failed == {"error": "RuntimeError: planted"}
    assert [len(one) for one in timed["rounds"]] == [1, 1, 1]


def asked(tuner: Tuner, plan: Path, requests: Sequence[Any], fault: str = "") -> list[Any]:
    """All that a juror says to these."""
    done = subprocess.run(
        [tuner.python, "-m", "pipeline.tune.judging.juror", str(plan), "cpu"],
        input="".join(json.dumps(one) + "\n" for one in requests),
        env={**tuner.environment(fault, "*"), "RANK": "0"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_jurors_out_of_bounds_are_refused(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", "--jurors", "99")
    assert (done.status, "--jurors 99 is not between 0 and 8" in done.stderr) == (2, True)


def test_judge_off_leaves_the_argmin(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", "--judge", "off")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert manifest.options["judge"] == "off"
    assert {(row.decided_by, row.ratio, row.default_ms) for row in manifest.covered} == {("argmin", None, None)}
    assert all(row.tactic != -1 for row in manifest.covered)


def test_a_wrong_tactic_is_blocked_and_the_bucket_tuned_again(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="wrong_and_fast", rank="*")
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert {(one["op"], one["bucket"], one["runner"], one["tactic"][0]) for one in manifest.blocked} == {
        ("narrow", 1, "CpuWholeRunner", "upcast"),
        ("narrow", 16, "CpuWholeRunner", "upcast"),
    }
    assert all("times the bound" in one["reason"] for one in manifest.blocked)
    assert len(manifest.covered) == 2
    assert not [row for row in manifest.covered if row.tactic != -1 and row.tactic[0] == "upcast"]
    assert tuner.run("pipeline.tune.replay", "--root", tmp_path / "out").status == 0


def test_a_rank_that_cannot_judge_leaves_the_argmin_on_all(tuner: Tuner, plan: Path, tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune", plan, tmp_path / "out", *ON, fault="no_memory_to_judge", rank=1)
    assert done.status == 0, done.stderr
    manifest, _ = read(tmp_path / "out")
    assert {row.decided_by for row in manifest.covered} == {"argmin"}
    assert all("not judged: MemoryError" in row.note for row in manifest.covered)
