"""Ranks that break the contract, die, stop or crawl: each ends in time, with the right rank named, nothing saved."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Done, Tuner, error_line, read_manifest, write_plan

from pipeline.contract.plan import Plan
from pipeline.tune.processes import process_state
from pipeline.tune.steps import read_step

pytestmark = pytest.mark.flashinfer

TIMEOUT = 4  # seconds, the bound of the process group
BOUND = 200  # seconds for everything, imports on a busy machine included; ranks may take 240 s to start


def once(*values: object) -> Any:
    """A case for the pinned FlashInfer alone."""
    return pytest.param(*values, marks=pytest.mark.once)


def broken(
    tuner: Tuner,
    plan: Plan,
    place: Path,
    fault: str,
    *words: object,
    rank: int = 1,
    warm: bool = True,
) -> Done:
    began = time.monotonic()
    file = write_plan(plan, place / "plan.json")
    done = tuner.run(
        "pipeline.tune", file, place / "out", "--timeout", TIMEOUT, *words, fault=fault, rank=rank, warm=warm
    )
    assert time.monotonic() - began < BOUND
    assert "Traceback (most recent call last)" not in done.stderr.split("ranks.log")[0]
    saved = [path.name for path in (place / "out").rglob("*") if path.name not in ("ranks.log", "failure.json")]
    assert saved == []
    return done


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        once("other_buckets", "rank 1 differs from the others in buckets before tuning"),
        once("other_skip_ops", "rank 1 differs from the others in plan digest before tuning"),
        once("other_seed", "rank 1 differs from the others in seed before tuning"),
        once("other_environment", "rank 1 differs from the others in FlashInfer's environment variables before tuning"),
        ("warm_cache", "rank 1 differs from the others in cache entries at entry before wide"),
        ("tactic_missing", "rank 1 differs from the others in tactic lists before wide"),
    ],
)
def test_a_broken_contract_names_rank_and_field(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, expected: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault)
    assert done.status == 6
    assert error_line(done) == f"error: {expected}"


BEFORE_TUNING = (
    "plan digest", "ops in order", "seed", "skip_ops", "round_up", "buckets", "timeout", "strategy", "resume", "comparing",
    "crashed tactics", "environment record", "FlashInfer's environment variables",
)  # fmt: skip
BEFORE_AN_OP = (
    "plan digest", "op", "buckets", "skip_ops", "rank to GPU", "cache entries at entry", "buckets to tune", "tactic lists",
)  # fmt: skip


def test_every_field_of_both_contracts_is_gathered_and_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """A value that differs is planted field by field; what makes some of them differ in life has tests of its own."""
    done = tuner.run("pipeline.tune", write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out",
                     fault="each_field_differs", rank="*")  # fmt: skip
    assert done.status == 6
    heard = error_line(done).partition("RuntimeError: ")[2].split("; ")
    assert sorted(heard) == sorted(
        [f"rank 1 differs from the others in {name} before tuning" for name in BEFORE_TUNING]
        + [f"rank 1 differs from the others in {name} before wide" for name in BEFORE_AN_OP]
    )


def test_different_tactics_are_refused(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = broken(tuner, make_plan(), tmp_path, "other_tactic")
    assert done.status == 6
    assert error_line(done).startswith("error: rank 1 chose another tactic than rank 0 for ('cpu_mm', ")
    assert '["blas", "nk", 0, 0, 99]' in done.stderr


@pytest.mark.once
def test_an_entry_that_one_rank_lacks_is_refused(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = broken(tuner, make_plan(), tmp_path, "entry_lost")
    assert done.status == 6
    assert "held by rank 0, the plan assigns it to rank 0, 1" in done.stderr


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "signal", "rank"), [("killed", "SIGKILL", 0), ("killed", "SIGKILL", 1), ("told_to_end", "SIGTERM", 1)]
)
def test_a_killed_rank_is_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, signal: str, rank: int
) -> None:
    """Although torchrun ends the others, with SIGTERM."""
    done = broken(tuner, make_plan(), tmp_path, fault, rank=rank, warm=False)
    assert done.status == 6
    assert error_line(done).startswith(f"error: rank {rank} was ended by {signal} at: tuning wide")


@pytest.mark.once
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_with_its_stack(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, rank: int
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "stopped", "--stage", rank=rank)
    assert done.status == 0
    failure = json.loads((tmp_path / "out" / "failure.json").read_text())
    assert failure["exit_code"] == 6
    assert failure["message"].startswith(f"rank {rank} is stopped at: tuning wide (cpu_mm), 3 buckets, cpu_mm (")
    assert [one["rank"] for one in failure["ranks"]] == [0, 1]
    assert "sitecustomize.py" in failure["ranks"][rank]["stack"]
    assert failure["ranks"][1 - rank]["step"].endswith("(waiting for the other ranks)")
    assert failure["hint"]


@pytest.mark.once
def test_a_rank_that_is_stopped_before_the_ranks_have_met_is_named_at_the_same_bound(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "stopped_while_starting")
    assert done.status == 6
    assert error_line(done) == "error: rank 1 is stopped at: importing torch and FlashInfer"
    assert "sitecustomize.py" in done.stderr
    assert "starting the ranks again" not in done.stderr


@pytest.mark.once
def test_a_rank_that_is_stopped_before_it_says_anything_is_named_at_the_same_bound(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "stopped_at_once", warm=False)
    assert done.status == 6
    assert error_line(done) == "error: rank 1 is stopped at: its start, before it said anything"


@pytest.mark.once
def test_a_rank_that_is_stopped_for_less_than_the_bound_is_waited_for(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--timeout", TIMEOUT, fault="stopped_for_a_while")
    assert done.status == 0, done.stderr
    assert done.told["covered"] == 5


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
    assert "sitecustomize.py" in done.stderr


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("out_of_memory_in_preparation", "preparing CpuWholeRunner"),
        ("out_of_memory_in_drawing", "drawing inputs"),
        ("out_of_memory_in_cloning", "copying inputs"),
    ],
)
def test_an_exhausted_memory_outside_of_a_tactic_names_the_rank(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, what: str
) -> None:
    done = broken(tuner, make_plan(), tmp_path, fault, "--timeout", 600)  # it is told before the others give up
    assert done.status == 6
    assert error_line(done) == f"error: rank 1: out of memory while {what} for cpu_mm"
    assert "planted exhaustion" in done.stderr


@pytest.mark.parametrize("strategy", ["synchronized", "sharded"])
def test_an_exhausted_memory_in_a_tactic_costs_that_tactic_alone(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, strategy: str
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = ("--timeout", 30, "--strategy", strategy)
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words, fault="out_of_memory_in_a_tactic")
    assert done.status == 0, done.stderr
    rows = read_manifest(tmp_path / "out").covered
    assert len(rows) == 5
    assert sum(row.failed for row in rows) == 1


@pytest.mark.once
def test_a_rank_that_is_slow_in_preparation_is_named_after_the_bound(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "slow_preparation")
    assert done.status == 6
    assert error_line(done).startswith("error: rank 1 made no progress at: tuning wide")
    assert "sitecustomize.py" in done.stderr


def test_a_rank_that_is_slow_in_preparation_is_waited_for_within_the_bound(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--timeout", 20, fault="slow_preparation_within_bound")
    assert done.status == 0, done.stderr
    assert done.told["covered"] == 5


def test_a_partial_result_is_refused(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = broken(tuner, make_plan(), tmp_path, "all_tactics_fail")
    assert done.status == 6
    assert "3 of 3 buckets have no entry" in error_line(done)


def test_a_name_that_flashinfer_lacks_is_said(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    done = broken(tuner, make_plan(), tmp_path, "name_missing")
    assert done.status == 6
    assert "has no flashinfer.autotuner.autotuner.AutoTuner._get_cache_key" in error_line(done)


@pytest.mark.once
def test_a_rank_that_dies_behind_the_last_meeting_leaves_no_cache(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Rank 0 has described the result by then; what was kept of it is there for the next run."""
    done = broken(tuner, make_plan(), tmp_path, "killed_when_all_is_done", "--state", tmp_path / "state")
    assert done.status == 6
    assert error_line(done).startswith("error: rank 1 was ended by SIGKILL at: checking the coverage")
    assert len(list((tmp_path / "state").glob("*.json"))) == 2


@pytest.mark.once
def test_what_cannot_be_kept_is_no_reason_to_end(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = ("--state", tmp_path / "state", "--strategy", "sharded")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words, fault="no_room_to_keep")
    assert done.status == 0, done.stderr
    assert done.told["covered"] == 5
    assert done.told["notes"] == ["finished ops could not be kept in --state: No space left on device"]


@pytest.mark.once
def test_an_entry_that_the_user_lists_as_bad_is_not_taken_up(
    tuner: Tuner, tuned: tuple[Path, Any], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    root, _ = tuned
    row = next(row for row in read_manifest(root).covered if row.tactic != -1)
    listed = {f"{row.entry.split(chr(39))[1]}::{row.runner}": [row.tactic]}
    (tmp_path / "bad.json").write_text(json.dumps({"invalid_tactics": listed}))
    file = write_plan(make_plan(), tmp_path / "plan.json")
    words = [tuner.python, "-m", "pipeline.tune", file, tmp_path / "out", "--compare", "off", "--previous", root]
    environment = {**tuner.environment(), "FLASHINFER_TACTICS_BLOCKLIST": str(tmp_path / "bad.json")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert any("are on FLASHINFER_TACTICS_BLOCKLIST" in note for note in notes)
    assert any(note.startswith("FLASHINFER_TACTICS_BLOCKLIST leaves out 1 tactics of cpu_mm::") for note in notes)
    chosen = read_manifest(tmp_path / "out").covered
    assert (row.runner, row.tactic) not in [(other.runner, other.tactic) for other in chosen]


def test_a_blocklist_that_flashinfer_cannot_read_is_said(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(), tmp_path, "broken_blocklist")
    assert done.status == 2
    assert "FlashInfer cannot read FLASHINFER_TACTICS_BLOCKLIST=" in error_line(done)
    assert "Traceback" not in done.stderr


@pytest.mark.once
def test_a_plan_for_elsewhere_is_refused(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = replace(make_plan(), arch="90a", flashinfer_version="0.1.0")
    done = broken(tuner, plan, tmp_path, "")
    assert done.status == 2
    assert "the plan is for FlashInfer 0.1.0" in error_line(done)
    assert "the plan is for the architecture '90a'" in done.stderr


@pytest.mark.once
def test_a_plan_whose_ops_are_all_skipped_is_refused(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    done = broken(tuner, make_plan(skip_ops=("cpu_mm",)), tmp_path, "")
    assert done.status == 2
    assert error_line(done) == "error: skip_ops (cpu_mm) leaves nothing to tune"


@pytest.mark.once
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_every_rank(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, number: signal.Signals
) -> None:
    status, said, ranks = signalled(tuner, make_plan(), tmp_path, number)
    assert status == 130
    assert "interrupted; nothing was saved" in said
    assert [pid for pid in ranks if process_state(pid) not in ("", "Z")] == []  # not every container reaps orphans
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob("tune-*")) == []


def signalled(tuner: Tuner, plan: Plan, place: Path, number: signal.Signals) -> tuple[int, str, list[int]]:
    """Send a signal to the supervisor of two ranks that measure: how it ended, what it said, the ranks' pids."""
    file = write_plan(plan, place / "plan.json")
    words = [tuner.python, "-m", "pipeline.tune", str(file), str(place / "out"), "--timeout", "60"]
    environment = {**tuner.environment("too_slow"), "FLASHINFER_WORKSPACE_BASE": str(place)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1/2 tuning wide" in line:
                break
        (work,) = place.glob("tune-*/run-0")
        steps = [read_step(work, rank) for rank in (0, 1)]
        ranks = [step.pid for step in steps if step is not None]
        assert len(ranks) == 2
        process.send_signal(number)
        said = process.stderr.read()  # its launcher and ranks write elsewhere
        return process.wait(120), said, ranks


@pytest.mark.once
def test_ranks_end_with_a_supervisor_that_is_killed(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    status, _, ranks = signalled(tuner, make_plan(), tmp_path, signal.SIGKILL)
    assert status == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while (left := [pid for pid in ranks if process_state(pid) not in ("", "Z")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not (tmp_path / "out").exists()


@pytest.mark.once
@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}'])
def test_a_plan_that_is_none_is_refused_at_once(tuner: Tuner, tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    done = tuner.run("pipeline.tune", tmp_path / "plan.json", tmp_path / "out")
    assert done.status == 2
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.once
def test_a_device_must_not_be_a_string(tuner: Tuner) -> None:
    code = (
        "from pipeline.contract.plan import OpPlan\n"
        "from pipeline.tune.ops import spec_of\n"
        "names = dict.fromkeys(('a', 'b', 'out'), 'float32')\n"
        "op = OpPlan('x', 'cpu_mm', {'n': 8, 'k': 8}, names, (1,))\n"
        "spec_of(op).make(op, 'cpu', 1)\n"
    )
    done = subprocess.run(
        [tuner.python, "-c", code], env=tuner.environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stderr.splitlines()[-1] == "TypeError: a device must be a torch.device, not str 'cpu'"
