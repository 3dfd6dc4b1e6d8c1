"""A run that is ended in the middle, and the next one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tune_harness import Tuner, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.contract.plan import OpPlan, Plan

pytestmark = pytest.mark.flashinfer

F32 = {"a": "float32", "b": "float32", "out": "float32"}


def interrupt(tuner: Tuner, plan: Path, place: Path, strategy: str) -> str:
    """Start a tuning whose second op stands still on one rank, and end it there."""
    words = [tuner.python, "-m", "pipeline.tune", str(plan), str(place / "out"), "--timeout", "60", "--compare", "off",
             "--state", str(place / "state"), "--strategy", strategy]  # fmt: skip
    environment = tuner.environment("stuck_in_narrow", 0, warm=True)
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "/3 tuning narrow" in line:
                break
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(120) == 130
    assert "interrupted; nothing was saved; --state" in said
    assert not (place / "out").exists()
    return said


@pytest.mark.parametrize("strategy", ["synchronized", "sharded"])
def test_only_what_was_not_finished_is_tuned_again(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, strategy: str
) -> None:
    plan = make_plan()
    plan = make_plan(ops=(*plan.ops, OpPlan("third", "cpu_mm", {"n": 128, "k": 32}, F32, (1, 16))))
    file = write_plan(plan, tmp_path / "plan.json")
    interrupt(tuner, file, tmp_path, strategy)
    kept = len(list((tmp_path / "state").glob("*.json")))
    assert kept >= 1  # sharded: by each rank what it had finished
    words = ("--timeout", 30, "--state", tmp_path / "state", "--strategy", strategy)
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words)
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    taken = [(row.op, row.bucket) for row in manifest.covered if row.note == "taken up from an interrupted run"]
    again = [(row.op, row.bucket) for row in manifest.covered if not row.note]
    assert len(taken) + len(again) == len(manifest.covered) == 7
    if strategy == "synchronized":
        assert kept == 1
        assert taken == [("wide", 1), ("wide", 8), ("wide", 32)]
        assert again == [("narrow", 1), ("narrow", 16), ("third", 1), ("third", 16)]
        assert "tuning wide" not in done.stderr
    assert taken
    assert any(op == "narrow" for op, _ in again)
    assert any(note.startswith(f"took up {len(taken)} buckets of ") for note in manifest.notes)
    assert [str(finding) for finding in check_root(tmp_path / "out")[1]] == []
    assert list((tmp_path / "state").iterdir()) == []  # what ended well is a cache, and no leftover of a run
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr


@pytest.mark.once
def test_no_resume_measures_everything(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan()
    plan = make_plan(ops=(*plan.ops, OpPlan("third", "cpu_mm", {"n": 128, "k": 32}, F32, (1, 16))))
    file = write_plan(plan, tmp_path / "plan.json")
    interrupt(tuner, file, tmp_path, "synchronized")
    done = tuner.run(
        "pipeline.tune", file, tmp_path / "out", "--timeout", 30, "--state", tmp_path / "state", "--no-resume"
    )
    assert done.status == 0, done.stderr
    assert [row.note for row in read_manifest(tmp_path / "out").covered] == [""] * 7


@pytest.mark.once
def test_a_state_that_cannot_be_written_is_refused(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    file = write_plan(make_plan(), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--state", tmp_path / "file" / "state")
    assert done.status == 2
    assert "--state" in done.stderr
