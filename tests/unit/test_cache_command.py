"""`pipeline cache` on files, directories and the host's store."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cache_samples as samples
import pytest

from pipeline.__main__ import main
from pipeline.cache.integrity import check_root
from pipeline.cache.otherkeys import other_keys
from pipeline.cache.read import read_cache
from pipeline.commands.cache import store
from pipeline.contract.digest import sha256_file
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

CASES = Path(__file__).parents[1] / "cases" / "caches"
A, B = CASES / "h200_two_tunes_a.json", CASES / "h200_two_tunes_b.json"
RANKS = CASES / "rank_keys" / "rank0.json", CASES / "rank_keys" / "rank1.json"
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def run(capsys, *words):
    code = main(["cache", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def twice(value):
    """A file as the tuner writes it: what fp8_gemm answers stands under its other keys as well."""
    return value | {other: entry for key, entry in value.items() for other in other_keys(key)}


# diff


def test_two_tunes_of_one_host_differ_in_their_tactics(capsys, tmp_path):
    for name, source in (("a", A), ("b", B)):
        (tmp_path / name).write_text(json.dumps(twice(json.loads(source.read_text()))))
    for a, b, second in ((A, B, 0), (B, A, 0), (tmp_path / "a", tmp_path / "b", 84)):
        code, out, _ = run(capsys, "diff", a, b, "--json")
        found = json.loads(out)
        assert (code, found["common"], found["differing"]) == (3, 168, 27)
        assert found["per_op"] == {"bf16_gemm": 14, "fp8_gemm": 13}
        assert found["only_a"] == found["only_b"] == [] and found["record"] == {}
        assert found["twice"] == {"a": second, "b": second}
        assert sum(pair["a"]["key"] != pair["b"]["key"] for pair in found["differ"]) == 4  # another runner won
    out = run(capsys, "diff", A, B)[1]
    assert "168 common shapes, 27 differ (14 bf16_gemm, 13 fp8_gemm)" in out
    assert "  bf16_gemm (1, 14336) × (14336, 4096): tactic 3 | 1\n" in out and ": runner Cu" in out
    assert run(capsys, "diff", A, A)[0] == 0


def test_entries_of_two_ranks_are_two_entries(capsys, tmp_path):
    code, out, _ = run(capsys, "diff", *RANKS)
    assert code == 3 and "0 common shapes, 0 differ, 1 entry only in a, 1 entry only in b" in out
    assert "(the other has (8, 2, 1) where this has (8, 2, 0))" in out
    assert run(capsys, "merge", *RANKS, "-o", tmp_path / "both.json")[0] == 0
    assert len(read_cache(tmp_path / "both.json").entries) == 2


def test_an_entry_that_only_one_has_and_another_record(capsys, tmp_path):
    value = json.loads(A.read_text())
    key = next(k for k in value if k != "_metadata")
    value["_metadata"]["gpu"] = H100
    (tmp_path / "less.json").write_text(json.dumps({k: v for k, v in value.items() if k != key}))
    code, out, _ = run(capsys, "diff", A, tmp_path / "less.json", "--json")
    found = json.loads(out)
    assert (code, found["common"], found["only_a"], found["only_b"]) == (3, 167, [key], [])
    assert found["record"] == {"gpu": {"a": H200, "b": H100}}


def test_second_keys_that_only_one_has_are_counted_apart(capsys, tmp_path):
    (tmp_path / "twice").write_text(json.dumps(twice(json.loads(A.read_text()))))
    code, out, _ = run(capsys, "diff", A, tmp_path / "twice")
    assert code == 3 and "168 common shapes, 0 differ, 84 entries only in b" in out
    assert "in b, 84 entries of fp8_gemm stand in the file a second time" in out


def test_times_stand_beside_the_tactics(capsys, tmp_path):
    one, two = samples.write(tmp_path / "a"), samples.write(tmp_path / "b", tactic=9)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 3 and "tactic 3 (0.5000 ms) | 9 (0.5000 ms)" in out
    assert run(capsys, "diff", one / CACHE_FILE, two / CACHE_FILE, "--json")[0] == 3
    entry = ["TiledRunner", 1, ["l2_cache_policy", "cold"], {"time_ms": 0.25}]
    (tmp_path / "new.json").write_text(json.dumps({"_metadata": samples.CPU, samples.entry_key(1): entry}))
    pair = json.loads(run(capsys, "diff", one, tmp_path / "new.json", "--json")[1])["differ"][0]
    assert (pair["bucket"], pair["a"]["time_ms"], pair["b"]["time_ms"]) == (1, 0.5, 0.25)


def test_roots_of_several_keys_are_compared_by_key(capsys, tmp_path):
    for name, gpus in (("a", (H200, H100)), ("b", (H200, "NVIDIA B200"))):
        for gpu in gpus:
            samples.write(tmp_path / name, gpu)
    code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    assert code == 3 and len(found["keys"]) == 1 and len(found["alone"]) == 2
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "a")[0] == 0


@pytest.mark.parametrize(
    ("what", "code"),
    [("truncated.json", 7), ("no_metadata.json", 7), ("list.json", 7), ("rank_keys", 7), ("none.json", 2)],
)
def test_what_is_no_cache_is_not_compared(capsys, what, code):
    found, _, err = run(capsys, "diff", A, CASES / what)
    assert found == code and "\nhint: " in err


@pytest.mark.parametrize("text", ["", "docker://x", "oci://", "Not A Name", "oci://host.example/UPPER"])
def test_a_place_that_cannot_be_is_one_line(capsys, text):
    code, _, err = run(capsys, "ls", text) if text else run(capsys, "diff", A, "")
    assert code == 2 and err.startswith("error: ") and "\nhint: " in err


# merge and export


def test_keys_are_put_side_by_side(capsys, tmp_path):
    made, _ = samples.manifest()
    ranks = (made.ranks[0], replace(made.ranks[1], entries=2))
    samples.write(tmp_path / "a", ranks=ranks, owners={samples.entry_key(8): (0,)})
    samples.write(tmp_path / "b", H100)
    code, out, _ = run(capsys, "merge", tmp_path / "a", tmp_path / "b", tmp_path / "a", "-o", tmp_path / "out")
    assert code == 0
    tree, findings = check_root(tmp_path / "out")
    assert findings == () and [str(one.key) for one in tree.keys] == out.split() and len(tree.keys) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "out"]
    assert run(capsys, "export", tmp_path / "out", "-o", tmp_path / "copy")[0] == 0
    assert run(capsys, "diff", tmp_path / "out", tmp_path / "copy")[0] == 0


def test_the_same_key_with_other_contents_is_refused_with_the_entries(capsys, tmp_path):
    samples.write(tmp_path / "a")
    samples.write(tmp_path / "b", tactic=9)
    code, _, err = run(capsys, "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert code == 7 and err.count("tactic 3 (0.5000 ms) | 9") == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ["merge", "export"])
def test_an_unsound_input_is_refused_with_every_reason(capsys, tmp_path, action):
    (samples.write(tmp_path / "a") / "stray").write_text("")
    (tmp_path / "a" / "link").symlink_to("/etc")
    code, _, err = run(capsys, action, tmp_path / "a", "-o", tmp_path / "out")
    assert code == 7 and "stray" in err and "symbolic link" in err and not (tmp_path / "out").exists()


def test_nothing_is_overwritten(capsys, tmp_path):
    file = samples.write(tmp_path / "a") / CACHE_FILE
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full" / "x").mkdir(parents=True)
    for out in (file / "x", tmp_path / "link", tmp_path / "file", tmp_path / "full", tmp_path / "a" / "inside"):
        for action, source in (("merge", tmp_path / "a"), ("export", tmp_path / "a"), ("merge", file)):
            if source == file and out.name == "inside":
                continue  # a file may lie beside others
            code, _, err = run(capsys, action, source, "-o", out)
            assert code == 2 and ("exists" in err or "is no directory" in err or "lies inside" in err), (out, err)
    assert (tmp_path / "file").read_text() == "mine" and check_root(tmp_path / "a")[1] == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "full", "link"]


@pytest.mark.parametrize("out", [".", "../empty"])
def test_an_empty_directory_is_filled_and_stays_the_same_one(capsys, tmp_path, monkeypatch, out):
    samples.write(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".tuned-image-pipeline-killed").mkdir()  # what a killed command left
    before = (tmp_path / "empty").stat().st_ino
    monkeypatch.chdir(tmp_path / "empty")
    assert run(capsys, "export", tmp_path / "a", "-o", out)[0] == 0
    assert (tmp_path / "empty").stat().st_ino == before  # a mount point cannot be replaced
    assert check_root(tmp_path / "empty")[1] == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch, empty):
    samples.write(tmp_path / "a")
    if empty:
        (tmp_path / "out").mkdir()

    def full(source, target, **_):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr("shutil.copyfile", full)
    code, _, err = run(capsys, "export", tmp_path / "a", "-o", tmp_path / "out")
    assert code == 2 and err.startswith("error: No space left on device") and "\nhint: " in err
    assert [p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*") if "a" not in p.parts] == ["out"] * empty


def test_a_current_folder_that_was_removed_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = run(capsys, "merge", A, A, "-o", "out.json")
    assert code == 2 and "No such file or directory" in err and "\nhint: " in err


def test_files_of_several_ranks_become_one(capsys, tmp_path):
    value = json.loads(A.read_text())
    keys = [k for k in value if k != "_metadata"]
    for number, part in enumerate((keys[:100], keys[60:])):
        half = {"_metadata": value["_metadata"], **{k: value[k] for k in part}}
        (tmp_path / f"{number}.json").write_text(json.dumps({**half, "_generation": "x", "_records": {"n": {"a": 1}}}))
    assert run(capsys, "merge", tmp_path / "0.json", tmp_path / "1.json", "-o", tmp_path / "out.json")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text()) == {**value, "_records": {"n": {"a": 1}}}
    code, _, err = run(capsys, "merge", A, B, "-o", tmp_path / "no.json")
    assert code == 7 and err.count(" | ") >= 27
    (tmp_path / "other.json").write_text(A.read_text().replace(H200, H100))
    code, _, err = run(capsys, "merge", A, tmp_path / "other.json", "-o", tmp_path / "no.json")
    assert code == 7 and "gpu: NVIDIA H200 in" in err and not (tmp_path / "no.json").exists()


def test_what_a_command_does_not_take_is_named(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "notes").touch()
    for words, code, said in (
        (("merge", A, tmp_path / "none.json", "-o", tmp_path / "out"), 2, "none.json is none"),
        (("merge", A, tmp_path / "empty", "-o", tmp_path / "out"), 2, "is a file, and"),
        (("ls", tmp_path / "none"), 2, "there is no"),
        (("ls", A), 2, "is not a directory"),
        (("inspect", A, "--key", "ab"), 2, "--key chooses among several"),
        (("inspect", tmp_path / "empty"), 7, "has no cache"),
        (("diff", tmp_path / "strange", A), 7, "strange has no cache: "),
        (("export", tmp_path / "empty", "-o", tmp_path / "out"), 7, "empty: has no cache"),
    ):
        found, _, err = run(capsys, *words)
        assert found == code and said in err.splitlines()[0] and "\nhint: " in err, err


def test_a_time_that_is_no_number_of_a_machine_is_not_known(capsys, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"_metadata": {"gpu": "x"}, "k": ["R", 0, [1], {"time_ms": 10**400}]}))
    assert run(capsys, "diff", file, file)[0] == 0


# ls, inspect and rm


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("pipeline.daemon.find", lambda: None)
    folder = tmp_path / "xdg" / "tuned-image-pipeline" / "warm-ups"
    for age, (name, tactic) in enumerate((("c" * 64, 1), ("b" * 64, 2), ("a" * 64, 3))):
        samples.write(folder / name / "root" / "opt/flashinfer_autotune_cache", tactic=tactic)
        facts = folder / name / "warmup.json"
        facts.write_text(json.dumps({"caches": [{"kind": "flashinfer-autotune", "bytes": 9}]}))
        os.utime(facts, (time.time() - age * 10 * 86_400,) * 2)
    (folder / ".keeping-x").mkdir()
    return folder


def left(home):
    return [p.name[0] for p in sorted(home.iterdir()) if not p.name.startswith(".")]


def used_by_an_image(home, letter):
    return {sha256_file(next(home.glob(f"{letter}*/root/**/{MANIFEST_FILE}")))}


def test_the_store_is_listed(capsys, home):
    code, out, _ = run(capsys, "ls", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["inputs"][0] for row in rows] == ["a", "b", "c"]  # oldest first
    assert {row["model"] for row in rows} == {"tiny"} and all(row["findings"] == [] for row in rows)
    assert rows[0]["bytes"] > 1000 and Path(rows[0]["path"]).is_dir()
    assert f"entry {'a' * 64}: flashinfer-autotune 9 bytes" in run(capsys, "ls")[1]
    next(home.glob(f"a*/root/**/{CACHE_FILE}")).write_text("{")
    assert "UNSOUND" in run(capsys, "ls")[1]
    (home / "d").mkdir()  # a server's caches alone
    assert "warm-up d\n" in run(capsys, "ls")[1]


@pytest.mark.parametrize("damage", ['{"caches": [{"kind": "x", "bytes": 1e999}]}', "[" * 200_000, "[]", None])
def test_a_damaged_entry_is_listed_and_removed_like_others(capsys, home, damage):
    facts = next(home.glob("a*")) / "warmup.json"
    facts.unlink()
    facts.write_text(damage) if damage else os.mkfifo(facts)
    code, out, _ = run(capsys, "ls", "--json")
    assert code == 0 and {row["inputs"][0]: row["kinds"] for row in json.loads(out)}["a"] == {}
    assert run(capsys, "rm", "aaa")[0] == 0 and left(home) == ["b", "c"]


def test_an_empty_store_says_how_to_fill_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run(capsys, "ls")
    assert (code, out) == (0, "") and "`pipeline build MODEL`" in err


def test_foreign_text_and_strays_are_shown_safely(capsys, tmp_path):
    place = samples.write(tmp_path / "r")
    text = (place / MANIFEST_FILE).read_text()
    (place / MANIFEST_FILE).write_text(text.replace('"tiny"', '"ti\\u001b]0;x\\u0007ny"'))
    (tmp_path / "r" / "stray").write_text("")
    code, out, err = run(capsys, "ls", tmp_path / "r")
    assert code == 0 and "ti\\x1b]0;x\\x07ny on" in out and "stray: lies where only directories belong" in err
    file = tmp_path / "\x1b[31m.json"
    file.write_bytes((place / CACHE_FILE).read_bytes())
    said = run(capsys, "diff", file, place / CACHE_FILE)[1] + run(capsys, "inspect", tmp_path / "r")[1]
    assert "\x1b" not in said


def test_inspect_shows_what_a_key_is_and_what_is_wrong_with_it(capsys, tmp_path):
    place = samples.write(tmp_path / "r", H200)
    samples.write(tmp_path / "r", H100)
    code, out, _ = run(capsys, "inspect", tmp_path / "r", "--key", place.name[:12])
    assert code == 0 and "  device    NVIDIA H200, driver 580.95" in out and H100 not in out
    assert "  model     tiny (tp=2 ep=1 pp=1 dp=1)" in out and "  entries   cpu_gemm: TiledRunner 3" in out
    found = json.loads(run(capsys, "inspect", place, "--json")[1])
    assert {one["manifest"]["record"]["flashinfer"]["gpu"] for one in found} == {H200, H100}
    assert run(capsys, "inspect", A)[0] == 0
    assert run(capsys, "inspect", CASES / "wild_gpu.json")[0] == 7
    assert run(capsys, "inspect", tmp_path / "r", "--key", "zz")[0] == 2
    (place / "stray").write_text("")
    code, out, _ = run(capsys, "inspect", tmp_path / "r")
    assert code == 7 and "UNSOUND" in out


def test_entries_are_removed_by_name_and_by_age(capsys, home):
    code, out, _ = run(capsys, "rm", "--older-than", "15", "--dry-run")
    assert code == 0 and "days old" in out and left(home) == ["a", "b", "c"]
    assert run(capsys, "rm", "--older-than", "15")[0] == 0 and left(home) == ["b", "c"]
    assert [p.name for p in home.iterdir() if p.name.startswith(".")] == [".keeping-x"]
    assert run(capsys, "rm", "bbb", "--dry-run")[0] == 0 and left(home) == ["b", "c"]
    assert run(capsys, "rm", "bbb", "b")[0] == 0 and left(home) == ["c"]
    assert run(capsys, "rm", "bbb")[0] == 2


def test_what_no_image_was_baked_from_is_removed_once_it_is_an_hour_old(capsys, home, monkeypatch):
    monkeypatch.setattr(store, "used_marks", lambda: used_by_an_image(home, "b"))
    run(capsys, "rm", "--unused")
    assert left(home) == ["b", "c"]  # c was kept just now: its image may be in the making
    os.utime(next(home.glob("c*/*.json")), (time.time() - 3700,) * 2)
    run(capsys, "rm", "--unused")
    assert left(home) == ["b"]
    entry = store.stored()[0]
    store.remove(entry)
    store.remove(entry)  # another removal was faster


def test_an_image_of_several_keys_uses_all_of_them(monkeypatch):
    image = SimpleNamespace(
        labels={"io.github.tuned-image-pipeline.manifest": "aa,bb", "io.github.tuned-image-pipeline.warm-up": "cc"}
    )
    client = SimpleNamespace(images=SimpleNamespace(list=lambda filters: [image]), close=lambda: None)
    monkeypatch.setattr("pipeline.daemon.find", object)
    monkeypatch.setattr("pipeline.daemon.connect", lambda engine: client)
    assert store.used_marks() == {"aa", "bb", "cc"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("a", "--unused"), 2),
        (("--older-than", "x"), 2),
        (("--older-than", "-1"), 2),
        (("--unused",), 4),
        (("",), 2),
    ],
)
def test_rm_needs_one_clear_wish(capsys, home, words, code):
    assert run(capsys, "rm", *words)[0] == code
    assert left(home) == ["a", "b", "c"]


# registries


def test_what_is_missing_or_is_no_registry_is_said(capsys, tmp_path):
    code, _, err = run(capsys, "push", tmp_path, "")
    assert code == 2 and "missing registry reference" in err and "OCI=" in err
    assert run(capsys, "push", tmp_path, "registry.example.com/x")[0] == 2
    assert run(capsys, "pull", "registry.example.com/x", "-o", tmp_path / "out")[0] == 2
