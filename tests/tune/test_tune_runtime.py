"""`with tuned():` in one's own program: the real FlashInfer answers from the baked file, or the program learns why."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

# A program as somebody would write it, for each of some roots; it counts what the real search_cache answered.
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
plan = walk(Path(sys.argv[1])).keys[0].manifest.plan
cases = [spec_of(op).make(op, torch.device("cpu"), 1) for op in plan.ops]
def serve(root, options):
    out = {"loaded": [], "hits": [], "rights": []}
    try:
        for _ in range(2):
            with tuned(root, **options) as loaded:
                out["loaded"].append(None if loaded is None else [loaded.key, loaded.entries])
                for case in cases:
                    for count in (1, 2, 40):
                        out["rights"].append(case.excess(count, case.call(count)) <= 1)
            out["hits"] += asked
            asked.clear()
            at.AutoTuner.get().clear_cache()   # the second time it must load again
    except NotTuned as error:
        out["refused"] = [error.message, error.details]
    return out
print(json.dumps([serve(*words) for words in json.loads(sys.argv[2])]))
"""


@pytest.fixture
def run(tuner, tuned, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def go(*cases):
        words = [str(tuned[0]), json.dumps([[str(root), options] for root, options in cases])]
        done = subprocess.run(
            [tuner.python, str(program), *words],
            env=tuner.environment(), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return go


def test_every_call_is_answered_from_the_file_and_a_misfit_is_said_once(run, tuned, tmp_path):
    (good, misfit, refused), said = run((tuned[0], {"require": True}), (tmp_path, {}), (tmp_path, {"require": True}))
    assert good["loaded"][0] == good["loaded"][1] and good["loaded"][0][1] > 0
    assert len(good["hits"]) == 12 and all(good["hits"]) and all(good["rights"])
    assert misfit["loaded"] == [None, None] and not any(misfit["hits"]) and all(misfit["rights"])
    assert said.count("no tuned cache is used: no tuned cache is baked") == 1
    assert refused["refused"][0].startswith("no tuned cache is used")


@pytest.mark.once
def test_a_cache_that_cannot_be_used_is_refused_with_the_reasons(run, tuned, tmp_path):
    changed, odd = tmp_path / "changed", tmp_path / "odd"
    shutil.copytree(tuned[0], changed)
    file = next(Path(changed).glob(f"*/*/*/{CACHE_FILE}"))
    value = json.loads(file.read_text())
    value["_metadata"]["gpu"] = "NVIDIA H200"
    text = json.dumps(value)
    file.write_text(text + " " * (len(file.read_bytes()) - len(text)))  # the size is not what gives it away
    shutil.copytree(tuned[0], odd)
    version = next(odd.iterdir())
    manifest = next(version.glob(f"*/*/{MANIFEST_FILE}"))
    manifest.write_text(manifest.read_text().replace(f'"key": "{version.name}/', '"key": "a copy/'))
    version.rename(odd / "a copy")
    named = (tuned[0], {"key": "ffff", "require": True})
    (of_changed, of_named, of_odd), said = run((changed, {"require": True}), named, (odd, {}))
    why = of_changed["refused"][1]
    assert any("gpu" in line for line in why) and any("sha256" in line for line in why)
    assert of_named["refused"][0] == "no tuned cache is used: no baked key is ffff"
    assert of_odd["loaded"] == [None, None] and all(of_odd["rights"]) and "a copy/" in said
