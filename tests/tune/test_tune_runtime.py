"""`with tuned():` in one's own program: the real FlashInfer answers from the baked file, or the program is told why."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

# A program as somebody would write it; it counts what the real search_cache answered.
PROGRAM = """
import json, sys, torch
from pathlib import Path
from pipeline.cache.tree import walk
from pipeline.tune import flashinfer_api
at = flashinfer_api.load()
asked = []
real = at.AutoTuner.search_cache
def seen(self, *words, **more):
    found = real(self, *words, **more)
    asked.append(bool(found[0]))
    return found
at.AutoTuner.search_cache = seen
from pipeline.tune.ops import spec_of
from pipeline.tune.runtime import NotTuned, tuned
root, tokens, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
plan = walk(Path(sys.argv[4])).keys[0].manifest.plan
cases = [spec_of(op).make(op, torch.device("cpu"), 1) for op in plan.ops]
out = {"loaded": [], "hits": [], "rights": []}
try:
    for _ in range(2):
        with tuned(root, **options) as loaded:
            out["loaded"].append(None if loaded is None else [loaded.key, loaded.entries])
            for case in cases:
                for count in tokens:
                    out["rights"].append(case.excess(count, case.call(count)) <= 1)
        out["hits"] += asked
        asked.clear()
        at.AutoTuner.get().clear_cache()   # the second time it must load again
except NotTuned as error:
    out["refused"] = [error.message, error.details]
print(json.dumps(out))
"""


@pytest.fixture
def run(tuner, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def go(root, sound, tokens=(1, 2, 40), **options):
        words = [str(root), json.dumps(list(tokens)), json.dumps(options), str(sound)]
        command = [tuner.python, str(program), *words]
        done = subprocess.run(
            command, env=tuner.environment(), capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return go


def test_every_call_is_answered_from_the_file(run, tuned):
    root, _ = tuned
    out, _ = run(root, root, require=True)
    assert out["loaded"][0] == out["loaded"][1] and out["loaded"][0][1] > 0
    assert len(out["hits"]) == 12 and all(out["hits"]) and all(out["rights"])


def test_a_misfit_is_said_once_and_runs_on_defaults(run, tuned, tmp_path):
    root, _ = tuned
    out, said = run(tmp_path, root)
    assert out["loaded"] == [None, None] and not any(out["hits"]) and all(out["rights"])
    assert said.count("no tuned cache is used: no tuned cache is baked") == 1
    out, _ = run(tmp_path, root, require=True)
    assert out["refused"][0].startswith("no tuned cache is used")


@pytest.mark.once
def test_a_changed_file_is_refused_with_the_reasons(run, tuned, tmp_path):
    root, _ = tuned
    copy = tmp_path / "root"
    shutil.copytree(root, copy)
    file = next(Path(copy).glob(f"*/*/*/{CACHE_FILE}"))
    value = json.loads(file.read_text())
    value["_metadata"]["gpu"] = "NVIDIA H200"
    text = json.dumps(value)
    file.write_text(text + " " * (len(file.read_bytes()) - len(text)))  # the size is not what gives it away
    out, _ = run(copy, root, require=True)
    assert any("gpu" in line for line in out["refused"][1]) and any("sha256" in line for line in out["refused"][1])


@pytest.mark.once
def test_a_directory_that_is_no_key_ends_no_program(run, tuned, tmp_path):
    root, _ = tuned
    copy = tmp_path / "root"
    shutil.copytree(root, copy)
    version = next(copy.iterdir())
    manifest = next(version.glob(f"*/*/{MANIFEST_FILE}"))
    manifest.write_text(manifest.read_text().replace(f'"key": "{version.name}/', '"key": "a copy/'))
    version.rename(copy / "a copy")
    out, said = run(copy, root)
    assert out["loaded"] == [None, None] and all(out["rights"]) and "a copy/" in said


@pytest.mark.once
def test_a_key_may_be_named(run, tuned):
    root, _ = tuned
    out, _ = run(root, root, key="ffff", require=True)
    assert out["refused"][0] == "no tuned cache is used: no baked key is ffff"


def test_explain_in_a_process_that_has_torch(tuner, tuned, tmp_path):
    root, _ = tuned
    done = tuner.run("pipeline.tune.explain", root)
    assert done.status == 0 and "\n  used" in done.stdout, done.stderr
    assert tuner.run("pipeline.tune.explain", "--json", root).told["verdict"] == "ok"
    assert tuner.run("pipeline.tune.explain", tmp_path).status == 7
    assert tuner.run("pipeline.tune.explain", tmp_path / "none").status == 2
