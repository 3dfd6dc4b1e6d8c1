"""Ranks that differ, die, stop, crawl or lack memory: each ends in time, the right rank is named, nothing is saved."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Done, Tuner, error_line, read_manifest, write_plan

from pipeline.contract.plan import Layout, Plan

pytestmark = pytest.mark.flashinfer

TIMEOUT = 4  # seconds, of the process group
LIMIT = 200  # seconds for everything, imports on a busy machine included; ranks may take 240 s to start


def once(*values: object) -> Any:
    """A case for the pinned FlashInfer alone."""
    return pytest.param(*values, marks=pytest.mark.once)


def broken(
    tuner: Tuner, plan: Plan, place: Path, fault: str, *words: object, rank: object = 1, warm: bool = True
) -> Done:
    began = time.monotonic()
    words = (write_plan(plan, place / "plan.json"), place / "out", "--timeout", TIMEOUT, *words)
    done = tuner.run("pipeline.tune", *words, fault=fault, rank=rank, warm=warm)
    assert time.monotonic() - began < LIMIT
    assert "Traceback (most recent call last)" not in done.stderr.split("ranks.log")[0]
    saved = [path.name for path in (place / "out").rglob("*") if path.name not in ("ranks.log", "failure.json")]
    assert saved == []
    return done


BEFORE_TUNING = (
    "plan digest", "ops in order", "seed", "skip_ops", "round_up", "buckets", "timeout", "strategy", "state", "comparing",
    "crashed tactics", "environment record", "FlashInfer's environment variables",
)  # fmt: skip
BEFORE_AN_OP = (
    "plan digest", "op", "buckets", "skip_ops", "rank to GPU", "cache entries at entry", "buckets to tune", "tactic lists",
)  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("when", "fields"), [("before tuning", BEFORE_TUNING), ("before wide", BEFORE_AN_OP)])
def test_every_field_of_both_contracts_is_compared_and_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, when: str, fields: Any
) -> None:
    """Of four ranks the last says something else for each."""
    plan = make_plan(layout=Layout(tp=2, ep=2, dp=2))
    done = broken(tuner, plan, tmp_path, f"each_field_differs_{when.replace(' ', '_')}", rank=3)
    assert (done.status, error_line(done)) == (6, f"error: rank 3 differs from the others in {min(fields)} {when}")
    assert sorted(re.findall(r"rank 3 differs in (.*?): ", done.stderr)) == sorted(fields)


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "field"), [("other_seed", "seed"), ("other_environment", "FlashInfer's environment variables")]
)
def test_ranks_that_were_started_differently_are_refused(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, field: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault)
    assert (done.status, error_line(done)) == (6, f"error: rank 1 differs from the others in {field} before tuning")


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("killed", 0, "rank 0 was ended by SIGKILL at: tuning wide"),
        ("told_to_end", 1, "rank 1 was ended by SIGTERM at: tuning wide"),
        ("stopped_while_importing", 0, "rank 0 is stopped at: importing torch and FlashInfer"),
        ("slow_preparation", 1, "rank 1 made no progress at: tuning wide"),
    ],
)
def test_a_rank_that_the_others_wait_for_is_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, rank: int, said: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault, rank=rank)
    assert (done.status, error_line(done).startswith(f"error: {said}")) == (6, True), done.stderr
    assert ("faults.py" in done.stderr) == (fault not in ("killed", "told_to_end")), "its stack"
    assert "starting the ranks again" not in done.stderr


@pytest.mark.once
def test_a_rank_that_dies_behind_the_last_meeting_leaves_no_cache(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Rank 0 has described the result by then; what was kept of it is there for the next run."""
    words = ("--state", tmp_path / "state")
    done = broken(tuner, make_plan(), tmp_path, "killed_when_all_is_done", *words, warm=False)
    assert done.status == 6
    assert error_line(done).startswith("error: rank 1 was ended by SIGKILL at: checking the coverage")
    assert len(list((tmp_path / "state").glob("*.json"))) == 2


@pytest.mark.once
def test_a_stopped_rank_is_named_with_its_stack_in_failure_json(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "stopped", "--keep-failure")
    assert done.status == 0
    failure = json.loads((tmp_path / "out" / "failure.json").read_text())
    assert failure["exit_code"] == 6
    assert failure["message"].startswith("rank 1 is stopped at: tuning wide (cpu_mm), 3 buckets, cpu_mm (")
    assert [one["rank"] for one in failure["ranks"]] == [0, 1]
    assert "faults.py" in failure["ranks"][1]["stack"]
    assert failure["ranks"][0]["step"].endswith("(waiting for the other ranks)")
    assert failure["hint"]


@pytest.mark.once
def test_a_rank_that_comes_back_from_no_tactic_is_named_with_its_stack(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Whatever it runs: nothing shows that the tactics are to blame, so the ranks are started again but once."""
    done = broken(tuner, make_plan(), tmp_path, "too_slow_everywhere")
    assert done.status == 6
    assert re.fullmatch(
        r"error: rank 1 made no progress in a second tactic, so the rank is to blame: "
        r"(Cpu\w+ tactic .+ of cpu_mm at \d+ tokens \(wide\)); before in (?!\1)Cpu\w+ tactic .+ tokens \(wide\)",
        error_line(done),
    )
    assert "(1 of 5 times at most)" in done.stderr
    assert "(2 of 5 times at most)" not in done.stderr
    assert "faults.py" in done.stderr


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("out_of_memory_in_preparation", "preparing CpuWholeRunner"),
        ("out_of_memory_in_drawing", "drawing inputs"),
        ("out_of_memory_in_copying", "copying inputs"),
    ],
)
def test_memory_that_runs_out_outside_of_a_tactic_names_the_rank(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, what: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault, "--timeout", 600)  # it fails before the others give up
    assert (done.status, error_line(done)) == (6, f"error: rank 1: out of memory while {what} for cpu_mm")
    assert "planted exhaustion" in done.stderr


@pytest.mark.parametrize("strategy", ["synchronized", once("sharded")])
def test_memory_that_runs_out_in_a_tactic_costs_that_tactic_alone(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, strategy: str
) -> None:
    words = (write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30, "--strategy", strategy)
    done = tuner.run("pipeline.tune", *words, fault="out_of_memory_in_a_tactic")
    assert done.status == 0, done.stderr
    rows = read_manifest(tmp_path / "out").covered
    assert (len(rows), sum(row.failed for row in rows)) == (5, 1)


@pytest.mark.once
def test_memory_that_runs_out_while_entries_are_collected_leaves_flashinfers_choice(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """On one rank, where comparing asks the op for its entries: no rank compares them, and a note says why."""
    words = (write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30, "--compare", "on")
    done = tuner.run("pipeline.tune", *words, fault="out_of_memory_in_collecting")
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert {row.decided_by for row in manifest.covered} == {"argmin"}
    assert "wide at 1 tokens was not compared: MemoryError: planted" in manifest.notes


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("all_tactics_fail", 6, "3 of 3 buckets have no entry"),
        ("broken_blocklist", 2, "FlashInfer cannot read FLASHINFER_TACTICS_BLOCKLIST="),
        once("name_missing", 6, "has no flashinfer.autotuner.autotuner.AutoTuner._get_cache_key"),
        once("flashinfer_0_6_12", 2, "FlashInfer 0.6.12 is refused: it has no process group"),
    ],
)
def test_what_flashinfer_cannot_do_is_said(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, status: int, said: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault)
    assert (done.status, said in error_line(done)) == (status, True), done.stderr


@pytest.mark.once
def test_what_cannot_be_kept_is_no_reason_to_end(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = ("--state", tmp_path / "state", "--strategy", "sharded")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words, fault="no_room_to_keep")
    assert done.status == 0, done.stderr
    assert done.told["covered"] == 5
    assert done.told["notes"] == ["finished ops could not be kept in --state: No space left on device"]


@pytest.mark.once
def test_an_entry_that_the_user_lists_as_bad_is_tuned_again(
    tuner: Tuner, tuned: tuple[Path, Any], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    root, _ = tuned
    row = next(row for row in read_manifest(root).covered if row.tactic != -1)
    listed = {f"{row.entry.split(chr(39))[1]}::{row.runner}": [row.tactic]}
    (tmp_path / "bad.json").write_text(json.dumps({"invalid_tactics": listed}))
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = [tuner.python, "-m", "pipeline.tune", file, tmp_path / "out", "--compare", "off", "--previous", root]
    environment = {**tuner.environment(warm=True), "FLASHINFER_TACTICS_BLOCKLIST": str(tmp_path / "bad.json")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert any("are on FLASHINFER_TACTICS_BLOCKLIST" in note for note in notes)
    assert any(note.startswith("FLASHINFER_TACTICS_BLOCKLIST leaves out 1 tactics of cpu_mm::") for note in notes)
    chosen = read_manifest(tmp_path / "out").covered
    assert (row.runner, row.tactic) not in [(other.runner, other.tactic) for other in chosen]


def ranks_of(place: Path) -> list[int]:
    """The processes of ranks whose working directory is below `place`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended
            continue
        if b"pipeline.tune.worker\0" in words and str(place).encode() in words and state != "Z":
            found.append(int(path.name))
    return found


@pytest.mark.once
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_a_supervisor_that_is_ended(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, number: signal.Signals
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = [tuner.python, "-m", "pipeline.tune", str(file), str(tmp_path / "out"), "--timeout", "60"]
    environment = {**tuner.environment("too_slow"), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1/2 tuning wide" in line:
                break
        assert len(ranks_of(tmp_path)) == 2
        process.send_signal(number)
        said = process.stderr.read()  # its ranks write elsewhere
        assert process.wait(120) == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 60
    while (left := ranks_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert list((tmp_path / "out").iterdir()) == []
    if number == signal.SIGINT:
        assert "interrupted; nothing was saved" in said
        assert list(tmp_path.glob("tune-*")) == []
