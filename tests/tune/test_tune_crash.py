"""A tactic that ends its process, or never returns: found, left out, the tuning resumed; and when that cannot go on."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import HERE, Done, Tuner, error_line, read_manifest, write_plan

from pipeline.cache.integrity import check_root
from pipeline.contract.plan import Plan

pytestmark = pytest.mark.flashinfer

COMPARE = ("--compare", "on", "--compare-budget", "600")
HUNG = r"did not return within \d+ s on rank [01]"


def tune(
    tuner: Tuner, plan: Plan, place: Path, fault: str, *words: object, rank: object = 1, timeout: int = 20
) -> Done:
    file = write_plan(plan, place / "plan.json")
    return tuner.run("pipeline.tune", file, place / "out", "--timeout", timeout, *words, fault=fault, rank=rank)


def blocked(root: Path) -> list[dict[str, Any]]:
    assert [str(finding) for finding in check_root(root)[1]] == []
    return list(read_manifest(root).blocked)


@pytest.mark.parametrize(
    ("fault", "strategy", "how", "timeout"),
    [
        ("crashing_tactic", "synchronized", "rank 1 was ended by SIGSEGV", 20),
        pytest.param("device_lost", "sharded", "the GPU of rank . takes no more work: AcceleratorError: planted", 20,
                     marks=pytest.mark.once),
        pytest.param("hanging_tactic", "synchronized", HUNG, 10, marks=pytest.mark.once),
    ],
)  # fmt: skip
def test_it_is_left_out_and_named(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, strategy: str, how: str, timeout: int
) -> None:
    plan = make_plan(ops=make_plan().ops[::-1])  # the op of the bad tactic comes second
    # Without --state finished ops are kept all the same, for as long as the tuning runs.
    words = ("--strategy", strategy, *(("--state", tmp_path / "state") if fault == "hanging_tactic" else ()))
    # In `sharded` the bucket belongs to one of the ranks, whichever it is dealt to.
    rank = 1 if strategy == "synchronized" else "*"
    done = tune(tuner, plan, tmp_path, fault, *words, rank=rank, timeout=timeout)
    assert done.status == 0, done.stderr
    rows = blocked(tmp_path / "out")
    assert rows
    assert {(one["op"], one["bucket"], one["runner"], one["tactic"][0]) for one in rows} == {
        ("wide", 8, "CpuWholeRunner", "blas")
    }
    assert all(re.fullmatch(how, one["reason"]) for one in rows), rows
    left_out = "left out from now on: CpuWholeRunner tactic ['blas', 'nk', 0, 0, 1] of cpu_mm at 8 tokens (wide)"
    assert left_out in done.stderr
    manifest = read_manifest(tmp_path / "out")
    chosen = {(row.op, row.bucket): row for row in manifest.covered}
    assert len(chosen) == 5
    assert chosen["wide", 8].tactic not in [one["tactic"] for one in rows]
    assert chosen["wide", 8].failed == len(rows)
    assert chosen["wide", 1].failed == chosen["wide", 32].failed == 0  # at other buckets it may run
    resumed = {row.op for row in manifest.covered if row.note == "resumed from an interrupted run"}
    assert "narrow" in resumed or strategy == "sharded"
    assert tuner.run("pipeline.tune.replay", "--root", tmp_path / "out").status == 0


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "words", "why"),
    [
        ("crashing_in_verifying", (), "rank . ended with 3"),
        ("hanging_in_comparing", COMPARE, HUNG),
        ("hanging_in_rounds", COMPARE, HUNG),
    ],
    ids=["while it is verified", "while a candidate is prepared", "in the rounds"],
)
def test_a_tactic_that_ends_its_rank_elsewhere_is_found_too(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, words: tuple[str, ...], why: str
) -> None:
    whole = make_plan()
    plan = replace(whole, ops=(replace(whole.ops[1], buckets=(16, 32)),))
    done = tune(tuner, plan, tmp_path, fault, *words, rank="*", timeout=6)
    assert done.status == 0, done.stderr
    rows = blocked(tmp_path / "out")
    assert {(one["op"], one["bucket"], one["tactic"][0]) for one in rows} == {("narrow", 16, "upcast")}
    assert all(re.fullmatch(why, one["reason"]) for one in rows), rows


@pytest.mark.once
def test_two_tactics_that_hang_are_both_left_out(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """One while it is measured, one while it is verified; in `sharded`, where nobody waits for the ranks that hang."""
    wide, narrow = make_plan().ops
    plan = make_plan(ops=(wide, replace(narrow, buckets=(16, 32))))
    done = tune(tuner, plan, tmp_path, "hanging_twice", "--strategy", "sharded", rank="*", timeout=6)
    assert done.status == 0, done.stderr
    found = {(one["op"], one["bucket"], one["tactic"][0]): one for one in blocked(tmp_path / "out")}
    assert found.keys() == {("wide", 8, "blas"), ("narrow", 16, "upcast")}
    assert all(re.fullmatch(HUNG, one["reason"]) for one in found.values())


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "hanging_default",
            r"rank 1 made no progress at: comparing wide .*, in Cpu\w+ tactic -1 of cpu_mm at 1 tokens",
        ),
        (
            "crashing_default",
            r"a tactic ended its rank: Cpu\w+ tactic -1 of cpu_mm at 1 tokens \(wide\): rank 1 was ended",
        ),
    ],
)
def test_a_default_that_does_it_is_named_and_ends_the_tuning(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, fault: str, said: str
) -> None:
    done = tune(tuner, make_plan(), tmp_path, fault, *COMPARE, timeout=6)
    assert done.status == 6
    assert re.match(f"error: {said}", error_line(done))
    assert "starting the ranks again" not in done.stderr
    assert ("in hang" in done.stderr) == (fault == "hanging_default"), "its stack"
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["ranks.log"]


@pytest.mark.once
def test_a_sample_that_never_ends_on_a_gpu_is_named_while_it_is_waited_for(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Samples of a GPU are launched one after the other, and waited for later."""
    op = replace(make_plan().ops[1], buckets=(128,))
    done = tune(tuner, make_plan(ops=(op,)), tmp_path, "hanging_sample", *COMPARE, rank="*", timeout=20)
    assert done.status == 0, done.stderr
    (row,) = blocked(tmp_path / "out")
    assert (row["bucket"], row["tactic"]) == (128, ["upcast", "nk", 0, 0, 1])
    assert re.fullmatch(HUNG, row["reason"])


@pytest.mark.once
def test_a_gpu_that_has_no_memory_left_is_not_taken_for_lost(tuner: Tuner) -> None:
    command = [tuner.python, str(HERE / "lost_sample.py")]
    done = subprocess.run(command, env=tuner.environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["", "", "RuntimeError: planted", "", "DeviceLost: RuntimeError: planted"]
