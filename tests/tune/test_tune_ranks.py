"""Two ranks tune a plan in step, and fresh ranks replay it."""

from __future__ import annotations

import json
import platform
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, only_key, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.contract.plan import Plan

pytestmark = pytest.mark.flashinfer


def test_the_record_names_this_machine(record: Any) -> None:
    assert record["arch"] == f"cpu-{platform.machine()}"
    assert set(record["host"]["cpu"]) == {"model", "flags", "threads"}
    assert record["flashinfer"]["gpu"] == "unknown"
    assert len(record["host"]["cpu"]["flags"]) == 64


def test_the_tuned_directory_is_sound_to_the_host(tuned: tuple[Path, Any]) -> None:
    root, told = tuned
    tree, findings = check_root(root)
    assert [str(finding) for finding in findings] == []
    assert [str(one.key) for one in tree.keys] == [told["key"]]
    assert {path.name for path in only_key(root).iterdir()} == {"autotune_configs.json", "manifest.json"}


@pytest.mark.once
def test_anyone_may_read_it(tuned: tuple[Path, Any]) -> None:
    root, _ = tuned
    for path in [root, *root.rglob("*")]:
        wanted = 0o755 if path.is_dir() else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_every_bucket_was_chosen_among_several_tactics(tuned: tuple[Path, Any]) -> None:
    manifest = read_manifest(tuned[0])
    assert Counter(row.op for row in manifest.covered) == {"wide": 3, "narrow": 2}
    for row in manifest.covered:
        assert row.candidates >= 5, row
        assert row.failed == 0, row
        assert row.time_ms is not None, row
        assert row.time_ms > 0, row
    assert [rank.rank for rank in manifest.ranks] == [0, 1]
    assert [rank.entries for rank in manifest.ranks] == [5, 5]
    assert len(manifest.substitutions) > 5
    assert manifest.strategy == "synchronized"


def test_replay_hits_everything(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune.replay", "--root", tuned[0], "--out", tmp_path / "told.json", warm=False)
    assert done.status == 0, done.stderr
    told = done.told
    # wide: 1 2 4 8 9 20 32 33; narrow: 1 2 8 16 17; two ranks
    assert (told["calls"], told["hits"]) == (26, 26)
    assert (told["misses"], told["wrong"], told["record_differences"], told["measured"]) == ([], [], [], 0)
    assert told["ranks"] == 2
    assert json.loads((tmp_path / "told.json").read_text()) == told


@pytest.mark.once
def test_replay_names_a_deleted_entry(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    row = next(r for r in read_manifest(root).covered if (r.op, r.bucket) == ("wide", 8))
    path = only_key(root) / "autotune_configs.json"
    entries = json.loads(path.read_text())
    del entries[row.entry]
    path.write_text(json.dumps(entries))
    done = tuner.run("pipeline.tune.replay", "--root", root)
    assert done.status == 7
    misses = done.told["misses"]
    assert {(m["op"], m["bucket"], m["entry"]) for m in misses} == {("wide", 8, row.entry)}
    assert [m["tokens"] for m in misses] == [8, 9, 20]
    assert all(m["ranks"] == [0, 1] for m in misses)
    assert row.entry in done.stderr


@pytest.mark.once
def test_replay_sees_a_wrong_output(tuner: Tuner, tuned: tuple[Path, Any]) -> None:
    done = tuner.run("pipeline.tune.replay", "--root", tuned[0], fault="wrong_output")
    assert done.status == 7
    assert done.told["misses"] == []
    assert {tuple(w["ranks"]) for w in done.told["wrong"]} == {(1,)}
    assert all("is wrong" in w["reason"] and "times the bound" in w["excess"] for w in done.told["wrong"])


def test_replay_sees_that_a_server_would_tune(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    path = only_key(root) / "autotune_configs.json"
    entries = json.loads(path.read_text())
    del entries[next(key for key in entries if key.startswith("('cpu_mm'"))]
    path.write_text(json.dumps(entries))
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="tuning_in_replay")
    assert done.status == 7
    assert done.told["measured"] > 0
    assert any("a server would tune" in w["reason"] for w in done.told["wrong"])


@pytest.mark.once
def test_replay_sees_that_the_file_was_changed(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="file_changed_in_replay")
    assert done.status == 7
    assert {w["reason"] for w in done.told["wrong"]} == {"the cache file was changed by the replay"}


@pytest.mark.once
def test_replay_refuses_another_processor(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    path = only_key(root) / "manifest.json"
    value = json.loads(path.read_text())
    value["record"]["host"]["cpu"]["model"] = "another"
    path.write_text(json.dumps(value))
    done = tuner.run("pipeline.tune.replay", "--root", root)
    assert done.status == 7
    (different,) = done.told["record_differences"]
    assert (different["field"], different["tuned"]) == ("cpu.model", "another")


@pytest.mark.once
@pytest.mark.parametrize("damage", ["truncated", "no manifest", "two keys", "nothing"])
def test_replay_refuses_what_is_no_cache(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path, damage: str) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    place = only_key(root)
    if damage == "truncated":
        (place / "autotune_configs.json").write_text('{"_metadata": {')
    elif damage == "no manifest":
        (place / "manifest.json").unlink()
    elif damage == "two keys":
        shutil.copytree(place, place.with_name("0" * 64))
    else:
        shutil.rmtree(root)
    done = tuner.run("pipeline.tune.replay", "--root", root)
    assert done.status == 7
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert "hint:" in done.stderr


def test_a_previous_cache_is_taken_up_and_only_the_new_is_tuned(
    tuner: Tuner, tuned: tuple[Path, Any], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = make_plan()
    grown = replace(plan, ops=(replace(plan.ops[0], buckets=(1, 8, 32, 64)), plan.ops[1]))
    file = write_plan(grown, tmp_path / "plan.json")
    words = ("--previous", tuned[0], "--timeout", 30)
    done = tuner.run("pipeline.tune", file, tmp_path / "out", *words, fault="second_keys", rank="*")
    assert done.status == 0, done.stderr
    manifest, earlier = read_manifest(tmp_path / "out"), read_manifest(tuned[0])
    taken = [row for row in manifest.covered if row.note.startswith("taken up")]
    assert [(row.op, row.bucket) for row in taken] == [
        ("wide", 1),
        ("wide", 8),
        ("wide", 32),
        ("narrow", 1),
        ("narrow", 16),
    ]
    assert {(r.entry, str(r.tactic), r.time_ms) for r in taken} == {
        (r.entry, str(r.tactic), r.time_ms) for r in earlier.covered
    }
    assert manifest.previous == earlier.files["autotune_configs.json"].sha256
    # The earlier cache is from before answers were written under second keys: the new one has them for what it took up.
    (stored,) = check_root(tmp_path / "out")[0].keys
    assert stored.file is not None
    held = [rank.entries for rank in manifest.ranks]
    assert (len(manifest.covered), len(stored.file.entries), held) == (6, 12, [12, 12])
    assert manifest.notes[-1].startswith("6 entries of fp8_gemm stand in the file a second time")
    assert check_root(tmp_path / "out")[1] == ()
    _replay_asks_for_both(tuner, tmp_path / "out")


def _replay_asks_for_both(tuner: Tuner, root: Path) -> None:
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="second_keys", rank="*")
    assert done.status == 0, done.stderr
    told = done.told
    assert told["calls"] == told["hits"] == told["other_calls"] == told["other_hits"] > 0
    said = f"{told['calls']} of {told['calls']}"
    assert f"{said} lookups hit, {said} for callers whose scales have the shape (1,)" in done.stderr
    path = only_key(root) / "autotune_configs.json"
    entries = json.loads(path.read_text())
    second = next(key for key in entries if ", (1, 192, 64), " in key)
    del entries[second]
    path.write_text(json.dumps(entries))
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="second_keys", rank="*")
    assert done.status == 7
    told = done.told
    assert told["hits"] == told["calls"] == told["other_calls"] > told["other_hits"]
    assert {(miss["caller"], tuple(miss["ranks"])) for miss in told["misses"]} == {
        ("callers whose scales have the shape (1,)", (0, 1))
    }
    assert "no entry answers callers whose scales have the shape (1,); expected ('cpu_mm', " in done.stderr
    done = tuner.run("pipeline.tune.replay", "--root", root)  # who asks as it was tuned misses nothing
    assert (done.status, done.told["other_calls"]) == (0, 0), done.stderr


@pytest.mark.once
def test_a_damaged_previous_cache_is_refused_and_said(
    tuner: Tuner, tuned: tuple[Path, Any], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    shutil.copytree(tuned[0], tmp_path / "earlier")
    path = only_key(tmp_path / "earlier") / "autotune_configs.json"
    path.write_bytes(path.read_bytes().replace(b'"blas"', b'"bla5"', 1).replace(b'"upcast"', b'"upca5t"', 1) + b"\n")
    file = write_plan(make_plan(), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--previous", tmp_path / "earlier", "--timeout", 30)
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert "was not taken up" in manifest.notes[0]
    assert manifest.previous == ""
    assert not [row for row in manifest.covered if row.note.startswith("taken up")]


@pytest.mark.parametrize("first", [False, True])
def test_an_op_of_one_rank_is_kept_with_its_owner(
    tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path, first: bool
) -> None:
    """As a dense layer that only one stage of a pipeline has; an op of all ranks may come before it or behind."""
    plan = make_plan()
    ops = (plan.ops[0], replace(plan.ops[1], ranks=(1,)))
    plan = replace(plan, ops=ops[::-1] if first else ops)
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30)
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert [rank.entries for rank in manifest.ranks] == [3, 5]
    assert set(manifest.owners) == {row.entry for row in manifest.covered if row.op == "narrow"}
    assert set(manifest.owners.values()) == {(1,)}
    assert [str(f) for f in check_root(tmp_path / "out")[1]] == []
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert done.told["calls"] == 8 + 8 + 5


@pytest.mark.once
def test_rounding_up_and_one_rank(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan(round_up=True)
    plan = replace(plan, layout=replace(plan.layout, tp=1))
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30)
    assert done.status == 0, done.stderr
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert (done.told["calls"], done.told["ranks"]) == (13, 1)


def test_a_slow_rank_is_waited_for(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan()
    plan = replace(plan, ops=(replace(plan.ops[0], buckets=(1,)),))
    file = write_plan(plan, tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--timeout", 10, fault="slow")
    assert done.status == 0, done.stderr
    (row,) = read_manifest(tmp_path / "out").covered
    assert row.time_ms is not None
    assert row.time_ms > 20  # the mean over both ranks: one of them slept 50 ms in every call
