"""`pipeline cache ls|diff|merge|export|prune` on files and directories."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cache_samples as samples
import pytest

from pipeline.__main__ import main
from pipeline.cache.difference import Side, difference
from pipeline.cache.otherkeys import other_keys
from pipeline.cache.read import read_cache
from pipeline.cache.store import check_root
from pipeline.commands.cache import store as _store
from pipeline.contract.digest import sha256_file
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

CASES = Path(__file__).parents[1] / "cases" / "caches"
A, B = CASES / "h200_two_tunes_a.json", CASES / "h200_two_tunes_b.json"
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def run(capsys, *words):
    code = main(["cache", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


# diff


def test_two_tunes_of_one_host(capsys):
    code, out, _ = run(capsys, "diff", A, B, "--json")
    found = json.loads(out)
    assert (code, found["common"], found["differing"]) == (3, 168, 27)
    assert found["per_op"] == {"bf16_gemm": 14, "fp8_gemm": 13}
    assert found["only_a"] == found["only_b"] == [] and found["record"] == {}
    assert sum(pair["a"]["key"] != pair["b"]["key"] for pair in found["differ"]) == 4  # another runner won
    code, out, _ = run(capsys, "diff", A, B)
    assert code == 3 and "168 common shapes, 27 differ (14 bf16_gemm, 13 fp8_gemm)" in out
    assert run(capsys, "diff", A, A)[0] == 0


def twice(value):
    """A file as the tuner writes it: what fp8_gemm answers stands under its other keys as well."""
    return value | {other: entry for key, entry in value.items() for other in other_keys(key)}


def test_an_answer_under_two_keys_counts_once(capsys, tmp_path):
    for name, source in (("a", A), ("b", B)):
        (tmp_path / name).write_text(json.dumps(twice(json.loads(source.read_text()))))
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    assert (code, found["common"], found["differing"]) == (3, 168, 27)
    assert found["per_op"] == {"bf16_gemm": 14, "fp8_gemm": 13}
    assert found["only_a"] == found["only_b"] == [] and found["twice"] == {"a": 84, "b": 84}
    assert sum(pair["a"]["key"] != pair["b"]["key"] for pair in found["differ"]) == 4
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert "168 common shapes, 27 differ" in out and "counted once: in each, 84 entries of fp8_gemm stand" in out


def test_second_keys_that_only_one_has_are_told(capsys, tmp_path):
    """A cache from before answers were written twice, and a callers' own answer under the second key."""
    value = json.loads(A.read_text())
    (tmp_path / "twice").write_text(json.dumps(twice(value)))
    code, out, _ = run(capsys, "diff", A, tmp_path / "twice", "--json")
    found = json.loads(out)
    assert (code, found["same"], found["common"], found["differing"]) == (3, False, 168, 0)
    assert (found["only_a"], len(found["only_b"]), found["twice"]) == ([], 84, {"a": 0, "b": 84})
    out = run(capsys, "diff", A, tmp_path / "twice")[1]
    assert "168 common shapes, 0 differ, 84 entries only in b" in out
    assert "in b, 84 entries of fp8_gemm stand in the file a second time" in out
    key, other = next((key, other_keys(key)[0]) for key in value if other_keys(key))
    (tmp_path / "own").write_text(json.dumps(twice(value) | {other: [value[key][0], 999]}))
    found = json.loads(run(capsys, "diff", tmp_path / "twice", tmp_path / "own", "--json")[1])
    assert (found["differing"], found["twice"]) == (1, {"a": 84, "b": 83})
    less = {k: v for k, v in twice(value).items() if k not in (key, other)}
    (tmp_path / "less").write_text(json.dumps(less))
    assert json.loads(run(capsys, "diff", tmp_path / "twice", tmp_path / "less", "--json")[1])["only_a"] == [key]


def test_a_diff_is_the_same_from_both_sides():
    a, b = Side.of("a", read_cache(A), None), Side.of("b", read_cache(B), None)
    there, back = difference(a, b), difference(b, a)
    assert (there.common, len(there.differ), there.per_op()) == (back.common, len(back.differ), back.per_op())


def test_entries_only_in_one_and_records(capsys, tmp_path):
    value = json.loads(A.read_text())
    del value[next(k for k in value if k != "_metadata")]
    value["_metadata"]["gpu"] = H100
    (tmp_path / "less.json").write_text(json.dumps(value))
    code, out, _ = run(capsys, "diff", A, tmp_path / "less.json", "--json")
    found = json.loads(out)
    assert (code, found["common"], len(found["only_a"]), found["only_b"]) == (3, 167, 1, [])
    assert found["record"] == {"gpu": {"a": H200, "b": H100}}


def test_times_stand_side_by_side(capsys, tmp_path):
    one, two = samples.write(tmp_path / "a"), samples.write(tmp_path / "b", tactic=9)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 3 and "tactic 3 (0.5000 ms) | 9 (0.5000 ms)" in out
    assert run(capsys, "diff", one / CACHE_FILE, two / CACHE_FILE, "--json")[0] == 3
    key = samples.entry_key(1)
    entry = ["TiledRunner", 1, ["l2_cache_policy", "cold"], {"time_ms": 0.25}]
    (tmp_path / "new.json").write_text(json.dumps({"_metadata": samples.CPU, key: entry}))
    _, out, _ = run(capsys, "diff", one, tmp_path / "new.json", "--json")
    pair = json.loads(out)["differ"][0]
    assert (pair["bucket"], pair["a"]["time_ms"], pair["b"]["time_ms"]) == (1, 0.5, 0.25)


def test_roots_of_several_keys_are_compared_by_key(capsys, tmp_path):
    for gpu in (H200, H100):
        samples.write(tmp_path / "a", gpu)
    samples.write(tmp_path / "b", H200)
    samples.write(tmp_path / "b", "NVIDIA B200")
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    assert code == 3 and len(found["keys"]) == 1 and len(found["alone"]) == 2
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "a")[0] == 0


def test_a_diff_of_what_is_no_cache(capsys, tmp_path):
    for name, code in (("truncated", 7), ("no_metadata", 7), ("list", 7), ("entry_not_pair", 7)):
        found, _, err = run(capsys, "diff", A, CASES / f"{name}.json")
        assert found == code and "hint: " in err
    assert run(capsys, "diff", A, tmp_path / "none.json")[0] == 2
    assert run(capsys, "diff", A, tmp_path)[0] == 7
    assert run(capsys, "diff", A)[0] == 2
    assert run(capsys, "diff", A, "oci:")[0] == 2
    assert run(capsys, "nothing")[0] == 2


# merge


def test_keys_are_put_side_by_side(capsys, tmp_path):
    for name, gpu in (("a", H200), ("b", H100)):
        samples.write(tmp_path / name, gpu)
    code, out, _ = run(capsys, "merge", tmp_path / "a", tmp_path / "b", tmp_path / "a", "-o", tmp_path / "out")
    assert code == 0 and len(out.splitlines()) == 2
    tree, findings = check_root(tmp_path / "out")
    assert findings == () and [str(one.key) for one in tree.keys] == out.split()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "out"]


def test_the_same_key_with_other_contents_is_refused_with_the_entries(capsys, tmp_path):
    samples.write(tmp_path / "a")
    samples.write(tmp_path / "b", tactic=9)
    code, _, err = run(capsys, "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert code == 7 and err.count("tactic 3 (0.5000 ms) | 9") == 3
    assert not (tmp_path / "out").exists()


def test_an_unsound_input_is_refused_with_every_reason(capsys, tmp_path):
    path = samples.write(tmp_path / "a")
    (path / "stray").write_text("")
    (tmp_path / "a" / "link").symlink_to("/etc")
    code, _, err = run(capsys, "merge", tmp_path / "a", "-o", tmp_path / "out")
    assert code == 7 and "stray" in err and "symbolic link" in err and not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_left_alone(capsys, tmp_path):
    samples.write(tmp_path / "a")
    (tmp_path / "out").mkdir()
    assert run(capsys, "merge", tmp_path / "a", "-o", tmp_path / "out")[0] == 0  # empty: taken
    assert run(capsys, "merge", tmp_path / "a", "-o", tmp_path / "out")[0] == 2
    (tmp_path / "file").write_text("mine")
    assert run(capsys, "merge", tmp_path / "a", "-o", tmp_path / "file")[0] == 2
    assert run(capsys, "merge", A, "-o", tmp_path / "file")[0] == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_is_a_usage_error(capsys, tmp_path):
    file = samples.write(tmp_path / "a") / CACHE_FILE
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for out in (file / "x", tmp_path / "link", tmp_path / "a" / "inside"):
        for words in (("merge", tmp_path / "a"), ("export", tmp_path / "a"), ("merge", file, file)):
            if words[1] == file and out.name == "inside":
                continue
            code, _, err = run(capsys, *words, "-o", out)
            assert code == 2 and ("exists" in err or "is no directory" in err or "lies inside" in err), (
                words,
                out,
                err,
            )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "link"]
    assert check_root(tmp_path / "a")[1] == ()


def test_files_of_several_ranks_become_one(capsys, tmp_path):
    value = json.loads(A.read_text())
    keys = [k for k in value if k != "_metadata"]
    halves = [{"_metadata": value["_metadata"], **{k: value[k] for k in part}} for part in (keys[:100], keys[60:])]
    for number, half in enumerate(halves):
        (tmp_path / f"{number}.json").write_text(json.dumps({**half, "_generation": "x", "_records": {"n": {"a": 1}}}))
    code, _, _ = run(capsys, "merge", tmp_path / "0.json", tmp_path / "1.json", "-o", tmp_path / "out.json")
    merged = json.loads((tmp_path / "out.json").read_text())
    assert code == 0 and merged == {**value, "_records": {"n": {"a": 1}}}
    read_cache(tmp_path / "out.json")


def test_files_that_disagree_are_not_merged(capsys, tmp_path):
    code, _, err = run(capsys, "merge", A, B, "-o", tmp_path / "out.json")
    assert code == 7 and err.count(" | ") >= 27 and not (tmp_path / "out.json").exists()
    other = json.loads(A.read_text())
    other["_metadata"]["gpu"] = H100
    (tmp_path / "o.json").write_text(json.dumps(other))
    code, _, err = run(capsys, "merge", A, tmp_path / "o.json", "-o", tmp_path / "out.json")
    assert code == 7 and "gpu: NVIDIA H200 in" in err


# export


def test_an_export_holds_what_belongs_to_the_caches(capsys, tmp_path):
    for gpu in (H200, H100):
        samples.write(tmp_path / "a", gpu)
    assert run(capsys, "export", tmp_path / "a", "-o", tmp_path / "dir")[0] == 0
    assert run(capsys, "diff", tmp_path / "dir", tmp_path / "a")[0] == 0
    assert check_root(tmp_path / "dir")[1] == ()
    assert run(capsys, "export", tmp_path / "a", "-o", tmp_path / "dir")[0] == 2


def test_an_unsound_cache_is_not_exported(capsys, tmp_path):
    path = samples.write(tmp_path / "a")
    (path / CACHE_FILE).write_text("{}")
    assert run(capsys, "export", tmp_path / "a", "-o", tmp_path / "dir")[0] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert run(capsys, "export", tmp_path / "none", "-o", tmp_path / "dir")[0] == 2


# ls and prune


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    tuned = tmp_path / "xdg" / "tuned-image-pipeline" / "tuned"
    for age, (name, tactic) in enumerate((("c" * 64, 1), ("b" * 64, 2), ("a" * 64, 3))):
        samples.write(tuned / name / "root", tactic=tactic)
        outcome = tuned / name / "outcome.json"
        outcome.write_text("{}")
        when = time.time() - age * 10 * 86_400
        os.utime(outcome, (when, when))
    (tuned / ".keeping-x").mkdir()
    (tuned / ".entry-x" / "entry").mkdir(parents=True)  # left by one that was killed
    monkeypatch.setattr("pipeline.daemon.find", lambda: None)
    return tuned


def test_the_store_is_listed(capsys, home):
    code, out, _ = run(capsys, "ls", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["inputs"][0] for row in rows] == ["a", "b", "c"]  # oldest first
    assert {row["model"] for row in rows} == {"tiny"} and all(row["findings"] == [] for row in rows)
    assert rows[0]["bytes"] > 1000 and Path(rows[0]["path"]).is_dir()
    next(home.glob("a*/root/*/*/*")).joinpath(CACHE_FILE).write_text("{")
    assert "UNSOUND" in run(capsys, "ls")[1]


def test_foreign_text_and_strays_are_listed_safely(capsys, tmp_path):
    place = samples.write(tmp_path / "r")
    text = (place / MANIFEST_FILE).read_text()
    (place / MANIFEST_FILE).write_text(text.replace('"tiny"', '"ti\\u001b]0;x\\u0007ny"'))
    (tmp_path / "r" / "stray").write_text("")
    code, out, err = run(capsys, "ls", tmp_path / "r")
    assert code == 0 and "ti\\x1b]0;x\\x07ny on" in out and "stray: lies where only directories belong" in err
    file = tmp_path / "\x1b[31m.json"
    file.write_bytes((place / CACHE_FILE).read_bytes())
    assert "\x1b" not in run(capsys, "diff", file, place / CACHE_FILE)[1]


def test_an_empty_store_says_how_to_fill_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run(capsys, "ls")
    assert (code, out) == (0, "") and "pipeline build" in err


def left(home):
    return [p.name[0] for p in sorted(home.iterdir()) if not p.name.startswith(".")]


def test_pruning_by_age(capsys, home):
    code, out, _ = run(capsys, "rm", "--older-than", "15", "--dry-run")
    assert code == 0 and "days old" in out and left(home) == ["a", "b", "c"]
    assert run(capsys, "rm", "--older-than", "15")[0] == 0
    assert left(home) == ["b", "c"]
    assert [p.name for p in home.iterdir() if p.name.startswith(".")] == [".keeping-x"]


def test_pruning_by_size_takes_the_unused_and_then_the_oldest(capsys, home, monkeypatch):
    size = str(sum(entry.size for entry in _store.stored()) - 1)
    _, out, err = run(capsys, "rm", "--max-size", size, "--dry-run")
    assert out.startswith("a") and "age alone decides" in err
    monkeypatch.setattr(_store, "used_manifests", lambda: used_by_an_image(home, "a"))
    out = run(capsys, "rm", "--max-size", size, "--dry-run")[1]
    assert out.startswith("b") and "an image has it" not in out and len(out.splitlines()) == 1
    monkeypatch.setattr(_store, "used_manifests", lambda: used_by_an_image(home, "c"))
    out = run(capsys, "rm", "--max-size", "0")[1]
    assert left(home) == [] and [line.endswith("an image has it") for line in out.splitlines()] == [False, False, True]


def used_by_an_image(home, letter):
    return {sha256_file(next(home.glob(f"{letter}*/root/*/*/*/{MANIFEST_FILE}")))}


def test_pruning_what_no_image_was_baked_from(capsys, home, monkeypatch):
    monkeypatch.setattr(_store, "used_manifests", lambda: used_by_an_image(home, "b"))
    run(capsys, "rm", "--unused")
    assert left(home) == ["b", "c"]  # c was kept just now: its image may be in the making
    os.utime(next(home.glob("c*/outcome.json")), (time.time() - 3700,) * 2)
    run(capsys, "rm", "--unused")
    assert left(home) == ["b"]


def test_an_image_of_several_keys_uses_all_of_them(monkeypatch):
    image = SimpleNamespace(labels={"io.github.tuned-image-pipeline.manifest": "aa,bb"})
    client = SimpleNamespace(images=SimpleNamespace(list=lambda filters: [image]), close=lambda: None)
    monkeypatch.setattr("pipeline.daemon.find", object)
    monkeypatch.setattr("pipeline.daemon.connect", lambda engine: client)
    assert _store.used_manifests() == {"aa", "bb"}


def test_pruning_needs_a_reason_and_an_engine_for_unused(capsys, home, monkeypatch):
    assert run(capsys, "rm")[0] == 2
    assert run(capsys, "rm", "--older-than", "x")[0] == 2
    assert run(capsys, "rm", "--max-size", "10 elephants")[0] == 2
    monkeypatch.setattr("pipeline.daemon.find", lambda: None)
    assert run(capsys, "rm", "--unused")[0] == 4
    assert left(home) == ["a", "b", "c"]


def test_an_entry_that_another_prune_took_is_no_error(home):
    entry = _store.stored()[0]
    _store.remove(entry)
    _store.remove(entry)
    assert left(home) == ["b", "c"]


def test_a_merged_root_keeps_what_owners_say(tmp_path, capsys):
    made, _ = samples.manifest()
    ranks = (made.ranks[0], replace(made.ranks[1], entries=2))
    samples.write(tmp_path / "a", ranks=ranks, owners={samples.entry_key(8): (0,)})
    assert run(capsys, "merge", tmp_path / "a", "-o", tmp_path / "out")[0] == 0
    assert check_root(tmp_path / "out")[1] == ()


# push


def test_a_push_to_nowhere_says_what_is_missing(capsys, tmp_path):
    code, _, err = run(capsys, "push", tmp_path, "")
    assert code == 2 and "missing registry reference" in err and "OCI=" in err
