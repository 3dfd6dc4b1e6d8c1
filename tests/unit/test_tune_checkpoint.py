"""What a tuning begins with, and how its result is put in place: files that are whole, refused with a reason, or not there."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import cache_samples as samples
import pytest
from planning_samples import plan_of as planned

from pipeline.__main__ import main
from pipeline.contract.commandline import Parser, seconds
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.contract.record import make_key
from pipeline.image.request import add_build_options, add_model
from pipeline.tune import publish
from pipeline.tune.__main__ import main as tuner
from pipeline.tune.agreement import Held
from pipeline.tune.arguments import parser as tuner_parser
from pipeline.tune.checkpoint import (
    RESUMED,
    Known,
    StateUnusable,
    all_terms,
    find_earlier,
    find_finished,
    forget,
    open_state,
    terms,
)
from pipeline.tune.steps import saved_path

ROOT = Path(__file__).resolve().parents[2]
H200 = "NVIDIA H200"
BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
PLAN = Plan(
    "m", "cuda", "90a", "0.6.16.post3", Layout(tp=2), (OpPlan("qkv", "mm_bf16", {"n": 64, "k": 64}, BF16, (1, 64)),)
)
DECIDING = {"strategy": "synchronized", "ranks": 2}
ROW = {"op": "qkv", "bucket": 1, "entry": "k1", "runner": "R", "tactic": [1, "x"], "candidates": 3}


def write(place: Path, plan: Plan = PLAN, **changes: object) -> Path:
    entries = {"k1": {"runner": "R", "tactic": [1, "x"], "policy": None, "selection": None}}
    body = {"ended": "2026-01-01T00:00:00+00:00", "entries": entries, "covered": [ROW], **changes}
    path = place / f"{terms(plan, plan.ops[0], DECIDING)}-00000000.json"
    path.write_text(json.dumps({"sha256": sha256_json(body), "body": body}))
    return path


def test_a_sound_piece_is_used_under_the_plans_name(tmp_path: Path) -> None:
    write(tmp_path)
    renamed = replace(PLAN, ops=(replace(PLAN.ops[0], name="other name", buckets=(1, 2)),))
    for plan in (PLAN, renamed):
        found = find_finished(tmp_path, plan, DECIDING)
        assert found.entries == {"k1": Held("R", [1, "x"])}
        assert [(row.op, row.bucket, row.note) for row in found.covered] == [(plan.ops[0].name, 1, RESUMED)]
        assert found.notes == (f"resumed 1 buckets of 1 ops from an interrupted run: {plan.ops[0].name}",)
    assert find_finished(None, PLAN, DECIDING) == find_finished(tmp_path / "absent", PLAN, DECIDING) == Known()


@pytest.mark.parametrize("what", ["dtypes", "strategy", "round_up", "seed"])
def test_other_terms_are_left_alone(tmp_path: Path, what: str) -> None:
    path = write(tmp_path)
    deciding, plan = DECIDING, PLAN
    if what == "strategy":
        deciding = {**DECIDING, "strategy": "sharded"}
    elif what == "dtypes":
        plan = replace(PLAN, ops=(replace(PLAN.ops[0], dtypes={**BF16, "a": "float16"}),))
    else:
        plan = replace(PLAN, **{what: True if what == "round_up" else 7})
    assert find_finished(tmp_path, plan, deciding) == Known()
    forget(tmp_path, all_terms(plan, deciding))
    assert path.exists()


@pytest.mark.parametrize("damage", ["cut", "deep", "list", "edited", "row", "no entry", "nothing timed", "field"])
def test_damage_is_refused_and_said(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage in ("deep", "list"):
        path.write_text("[]" if damage == "list" else "[" * 100_000)
    elif damage == "edited":
        path.write_text(path.read_text().replace('"x"', '"y"'))
    else:
        wrong = {"row": {"tactic": [2]}, "no entry": {"entry": "k2"}, "nothing timed": {"candidates": 0}}
        write(tmp_path, covered=[{**ROW, **wrong.get(damage, {"unheard": 1})}])
    found = find_finished(tmp_path, PLAN, DECIDING)
    assert (found.entries, found.covered) == ({}, ())
    (note,) = found.notes
    assert note.startswith(f"{path.name} of an interrupted run was not used: ")


def test_forgetting_removes_what_belongs_to_the_plan(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / f".{path.name}.x7_k").write_text("{")  # left by a rank that was ended while it wrote
    forget(tmp_path, all_terms(PLAN, DECIDING))
    assert [one.name for one in tmp_path.iterdir()] == ["other.json"]
    forget(None, all_terms(PLAN, DECIDING))


def test_a_state_that_cannot_be_written_is_found_before_anything_is_tuned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable, match="Not a directory") as caught:
        open_state(tmp_path / "file" / "state")
    assert isinstance(caught.value, UsageError)
    assert open_state(tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_the_newest_sound_cache_of_this_environment_is_used(tmp_path: Path) -> None:
    samples.write(tmp_path, H200)
    found = find_earlier(tmp_path, samples.record(H200))
    assert found.cache and len(found.covered) == 3
    assert found.notes[0].startswith("began with 3 buckets of the earlier cache ")
    other = find_earlier(tmp_path, samples.record("NVIDIA B200"))
    assert not other.cache and "it was tuned elsewhere" in other.notes[0]
    assert find_earlier(None, samples.record(H200)) == Known()
    (tmp_path / "empty").mkdir()
    for place, said in ((tmp_path / "empty", "there is none in"), (tmp_path / "absent", "is not a directory")):
        (note,) = find_earlier(place, samples.record(H200)).notes
        assert note.startswith("no earlier cache was used: ") and said in note and str(place) in note


@pytest.mark.parametrize("damage", ["cut", "edited", "no manifest", "manifest cut", "entry gone"])
def test_a_damaged_earlier_cache_is_not_used_and_an_older_sound_one_is(tmp_path: Path, damage: str) -> None:
    place = samples.write(tmp_path / "new", H200, ended="2026-06-01T00:00:00Z")
    cache, manifest = place / CACHE_FILE, place / MANIFEST_FILE
    if damage == "cut":
        cache.write_bytes(cache.read_bytes()[:-9])
    elif damage == "edited":
        cache.write_text(cache.read_text().replace("3", "4"))
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    else:
        entries = json.loads(cache.read_text())
        del entries[samples.entry_key(8)]
        cache.write_text(json.dumps(entries))
    found = find_earlier(tmp_path / "new", samples.record(H200))
    assert (found.cache, found.covered) == (b"", ())
    (note,) = found.notes
    assert note.startswith("the earlier cache 0.6.16.post3/90a/") and " was not used: " in note
    made, data = samples.manifest(H200)
    other = replace(made.plan, seed=made.plan.seed, ops=(replace(made.plan.ops[0], shape={"n": 256, "k": 64}),))
    samples.write(tmp_path / "new", H200, plan=other, key=str(make_key(other.digest, made.record)))
    found = find_earlier(tmp_path / "new", samples.record(H200))
    assert found.cache == data and len(found.covered) == 3
    assert found.notes[-1].startswith("began with 3 buckets of the earlier cache ")


def test_two_results_of_one_key_at_once_are_put_in_place_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "key"
    place.mkdir()
    first_is_between, moved = threading.Event(), Path.rename

    def slow(path: Path, target: Path) -> Path:
        found = moved(path, target)
        if path == place and not first_is_between.is_set():  # the old one is away, the new one not there yet
            first_is_between.set()
            time.sleep(0.5)  # the second one comes
        return found

    monkeypatch.setattr(Path, "rename", slow)
    failed: list[OSError] = []

    def put(name: str) -> None:
        made = tmp_path / name / "new"
        made.mkdir(parents=True)
        try:
            publish.put_in_place(made, place)
        except OSError as error:
            failed.append(error)
        shutil.rmtree(made.parent, ignore_errors=True)

    first, second = (threading.Thread(target=put, args=(name,)) for name in ("first", "second"))
    first.start()
    assert first_is_between.wait(60)
    second.start()
    first.join(60)
    second.join(60)
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_is_in_the_way_of_a_result_is_named(tmp_path: Path) -> None:
    found, data = samples.manifest()
    saved = saved_path(tmp_path)
    saved.parent.mkdir()
    saved.write_bytes(data)
    saved.with_name(MANIFEST_FILE).write_text(json.dumps(found.to_json()))
    out = tmp_path / "out"
    out.mkdir()
    (out / found.key.split("/")[0]).touch()
    with pytest.raises(publish.OutUnusable) as caught:
        publish.finish(out, tmp_path, tmp_path)
    assert caught.value.message.startswith(f"{out}/{found.key.split('/')[0]}")
    assert caught.value.hint.startswith("nothing was saved; --state keeps what was tuned; move what is in the way")


def test_without_torch_one_line_says_what_to_type(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(planned("tiny", arch="cpu-x86_64", tp=2).to_json()))
    words = [sys.executable, "-m", "pipeline.tune", str(plan), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: {sys.executable} has no torch" in done.stderr and "`pipeline tune MODEL`" in done.stderr
    assert "Traceback" not in done.stderr and "tune on" not in done.stderr


def test_a_leader_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the host before it looks for a Docker Engine, by the tuner before it starts a rank."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the tuner's own handler is not for this process
    words = ["tiny-moe", "--tp", "4", "--ep", "4", "--device", "cpu"]
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "--output", str(file)]) == 0
    capsys.readouterr()
    assert main(["build", *words, "--strategy", "leader"]) == 2
    told = capsys.readouterr().err
    assert tuner([str(file), str(tmp_path / "out"), "--strategy", "leader"]) == 2
    for err in (told, capsys.readouterr().err):
        assert err.startswith("error: --strategy leader with EP=4: in an all-to-all")
        assert "hint: use --strategy synchronized or sharded" in err


def asked(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_model(parser)
    add_build_options(parser)
    return parser.parse_args(["tiny", *words])


@pytest.mark.parametrize(
    ("option", "value", "fine"),
    [
        ("--timeout", "1", True), ("--timeout", "86400", True), ("--timeout", "0.5", False), ("--timeout", "86401", False),
        ("--compare-budget", "0.0001", True), ("--compare-budget", "3600", True), ("--compare-budget", "0", False),
        ("--compare-budget", "nan", False),
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


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e3", "nan", "١", "9" * 5000])
def test_a_timeout_is_some_whole_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds from 1 to 86400"):
        seconds(text)
