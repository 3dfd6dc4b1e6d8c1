"""Ranks tune a plan together, and fresh ranks replay it: two or eight; whole, or with something missing."""

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

from pipeline.cache.integrity import check_root
from pipeline.contract.plan import Layout, OpPlan, Plan

pytestmark = pytest.mark.flashinfer


def test_the_tuned_directory_is_sound_whole_and_readable_by_anyone(tuned: tuple[Path, Any], record: Any) -> None:
    root, told = tuned
    tree, findings = check_root(root)
    assert [str(finding) for finding in findings] == []
    assert [str(one.key) for one in tree.keys] == [told["key"]]
    assert {path.name for path in only_key(root).iterdir()} == {"autotune_configs.json", "manifest.json"}
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
    manifest = read_manifest(root)
    assert Counter(row.op for row in manifest.covered) == {"wide": 3, "narrow": 2}
    for row in manifest.covered:
        assert (row.candidates >= 5, row.failed, (row.time_ms or 0) > 0) == (True, 0, True), row
    assert [(rank.rank, rank.entries) for rank in manifest.ranks] == [(0, 5), (1, 5)]
    assert len(manifest.substitutions) > 5
    assert told["strategy"] == manifest.strategy == "synchronized"
    assert "has set_autotune_process_group" in manifest.strategy_reason
    assert record["arch"] == f"cpu-{platform.machine()}"
    assert set(record["host"]["cpu"]) == {"model", "flags", "threads"}
    assert (record["flashinfer"]["gpu"], len(record["host"]["cpu"]["flags"])) == ("unknown", 64)


def test_replay_hits_everything(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    done = tuner.run("pipeline.tune.replay", "--root", tuned[0], "--out", tmp_path / "told.json", warm=False)
    assert done.status == 0, done.stderr
    told = done.told
    # wide: 1 2 4 8 9 20 32 33; narrow: 1 2 8 16 17; two ranks
    assert (told["calls"], told["hits"], told["ranks"]) == (26, 26, 2)
    assert (told["misses"], told["wrong"], told["record_differences"], told["measured"]) == ([], [], [], 0)
    assert json.loads((tmp_path / "told.json").read_text()) == told


def without_entry(root: Path, entry: str) -> None:
    path = only_key(root) / "autotune_configs.json"
    entries = json.loads(path.read_text())
    del entries[entry]
    path.write_text(json.dumps(entries))


@pytest.mark.once
def test_replay_finds_what_is_missing_wrong_or_of_another_machine(
    tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    row = next(r for r in read_manifest(root).covered if (r.op, r.bucket) == ("wide", 8))
    without_entry(root, row.entry)
    path = only_key(root) / "manifest.json"
    value = json.loads(path.read_text())
    value["record"]["host"]["cpu"]["model"] = "another"
    path.write_text(json.dumps(value))
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="wrong_output_and_file_changed")
    assert done.status == 7
    misses, wrong = done.told["misses"], done.told["wrong"]
    assert {(m["op"], m["bucket"], m["entry"], *m["ranks"]) for m in misses} == {("wide", 8, row.entry, 0, 1)}
    assert [m["tokens"] for m in misses] == [8, 9, 20]
    assert row.entry in done.stderr
    changed = [w for w in wrong if w["reason"] == "the cache file was changed by the replay"]
    assert 1 in changed[0]["ranks"], changed
    wrong = [w for w in wrong if w not in changed]
    assert all("is wrong" in w["reason"] and "times the bound" in w["excess"] for w in wrong), wrong
    assert {tuple(w["ranks"]) for w in wrong} == {(1,)}
    (different,) = done.told["record_differences"]
    assert (different["field"], different["tuned"]) == ("cpu.model", "another")


def test_replay_sees_that_a_server_would_tune(tuner: Tuner, tuned: tuple[Path, Any], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(tuned[0], root)
    without_entry(root, read_manifest(root).covered[0].entry)
    done = tuner.run("pipeline.tune.replay", "--root", root, fault="tuning_in_replay")
    assert done.status == 7
    assert done.told["measured"] > 0
    assert any("a server would tune" in w["reason"] for w in done.told["wrong"])


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
    assert (done.status, "Traceback" in done.stderr) == (7, False)
    assert "error:" in done.stderr and "hint:" in done.stderr


def test_a_previous_cache_is_used_and_only_the_new_is_tuned(
    tuner: Tuner, tuned: tuple[Path, Any], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan, root = make_plan(), tmp_path / "out"
    grown = replace(plan, ops=(replace(plan.ops[0], buckets=(1, 8, 32, 64)), plan.ops[1]))
    file = write_plan(grown, tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, root, "--previous", tuned[0], "--timeout", 30)
    assert done.status == 0, done.stderr
    manifest, earlier = read_manifest(root), read_manifest(tuned[0])
    known = [row for row in manifest.covered if row.note == "from an earlier cache"]
    assert [replace(row, note="") for row in known] == list(earlier.covered)
    assert len(manifest.covered) == 6
    assert manifest.previous == earlier.files["autotune_configs.json"].sha256
    assert check_root(root)[1] == ()


def test_entries_of_bmm_fp8_stand_under_both_keys(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """With a stand-in for its kernel. An earlier cache that has only the first of two keys is used too."""
    root, fp8 = tmp_path / "out", {"fault": "fp8", "rank": "*"}
    op = OpPlan("qkv", "bmm_fp8", {"n": 4, "k": 8}, dict.fromkeys("ab", "float8_e4m3fn"), (1, 8))
    file = write_plan(make_plan(ops=(op,)), tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, root, "--timeout", 30, **fp8)
    assert done.status == 0, done.stderr
    tree, findings = check_root(root)
    assert findings == () and tree.keys[0].file is not None
    manifest, entries = read_manifest(root), tree.keys[0].file.entries
    assert (len(manifest.covered), len(entries), [rank.entries for rank in manifest.ranks]) == (2, 4, [4, 4])
    assert any(note.startswith("2 entries of fp8_gemm stand in the file a second time") for note in manifest.notes)
    done = tuner.run("pipeline.tune.replay", "--root", root, **fp8)
    assert done.status == 0, done.stderr
    assert [done.told[name] for name in ("calls", "hits", "other_calls", "other_hits")] == [10] * 4
    without_entry(root, next(key for key in entries if ", (1,), (1,), " in key))
    done = tuner.run("pipeline.tune.replay", "--root", root, **fp8)
    assert done.status == 7
    assert done.told["hits"] == done.told["calls"] == done.told["other_calls"] > done.told["other_hits"]
    assert "no entry answers callers whose scales have the shape (1,); expected ('fp8_gemm', " in done.stderr


def test_an_op_of_one_rank_is_kept_with_its_owner(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """As a dense layer that only one stage of a pipeline has; ops of all ranks come before it and behind."""
    wide, narrow = make_plan().ops
    third = replace(wide, name="third", shape={"n": 128, "k": 32}, buckets=(1,))
    plan = make_plan(ops=(wide, replace(narrow, ranks=(1,)), third))
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out", "--timeout", 30)
    assert done.status == 0, done.stderr
    manifest = read_manifest(tmp_path / "out")
    assert [rank.entries for rank in manifest.ranks] == [4, 6]
    assert set(manifest.owners) == {row.entry for row in manifest.covered if row.op == "narrow"}
    assert set(manifest.owners.values()) == {(1,)}
    assert [str(f) for f in check_root(tmp_path / "out")[1]] == []
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert done.told["calls"] == 2 * (8 + 2) + 5


def test_times_are_means_over_the_ranks(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """One of the two ranks sleeps 50 ms in every call."""
    plan = make_plan()
    plan = replace(plan, ops=(replace(plan.ops[0], buckets=(1,)),))
    file = write_plan(plan, tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--timeout", 10, fault="slow")
    assert done.status == 0, done.stderr
    (row,) = read_manifest(tmp_path / "out").covered
    assert row.time_ms is not None
    assert row.time_ms > 20


@pytest.mark.once
def test_eight_ranks_share_the_work_and_replay_it(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make_plan(layout=Layout(tp=8))
    plan = replace(plan, ops=tuple(replace(op, buckets=(1, 2, 4, 8)) for op in plan.ops))
    file = write_plan(plan, tmp_path / "plan.json")
    done = tuner.run("pipeline.tune", file, tmp_path / "out", "--strategy", "sharded", "--timeout", 60)
    assert done.status == 0, done.stderr
    assert [str(finding) for finding in check_root(tmp_path / "out")[1]] == []
    manifest = read_manifest(tmp_path / "out")
    assert [rank.rank for rank in manifest.ranks] == list(range(8))
    assert sorted(manifest.owners.values()) == [(rank,) for rank in range(8)]
    done = tuner.run("pipeline.tune.replay", "--root", tmp_path / "out")
    assert done.status == 0, done.stderr
    assert done.told["ranks"] == 8
    assert done.told["hits"] == done.told["calls"] > 0
