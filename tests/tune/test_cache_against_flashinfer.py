"""Our judgement against FlashInfer's own: records classified, files loaded."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from pipeline.cache.judge import compare, judge_source
from pipeline.cache.read import inspect_cache

CASES = Path(__file__).parents[1] / "cases" / "caches"
pytestmark = pytest.mark.flashinfer

# Runs beside FlashInfer: classifies pairs of records, loads files under a given record, says what it then holds.
ORACLE = """
import json, sys
from unittest import mock
import flashinfer.autotuner.autotuner as at
work = json.load(sys.stdin)
out = {"classified": [], "loaded": [], "fields": list(at._collect_metadata())}
for saved, current in work["pairs"]:
    hard, soft = at._classify_metadata_mismatches(saved, current)
    out["classified"].append([hard, soft])
for path, current in work["files"]:
    tuner = at.AutoTuner.get()
    tuner.clear_cache()
    with mock.patch.object(at, "_collect_metadata", lambda: dict(current)):
        try:
            ok = tuner.load_configs(path)
            out["loaded"].append([ok, len(tuner._file_configs)])
        except Exception as error:
            out["loaded"].append([type(error).__name__, 0])
json.dump(out, sys.stdout)
"""


def ask(tuner, work):
    command = [tuner.python, "-c", ORACLE]
    env = tuner.environment()
    done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


HERE = {**json.loads((CASES / "expected.json").read_text())["_environment"]["metadata"], "cutlass_dsl_version": "4.7"}
VALUES = [None, "unknown", "None", "*", "", "13.0", "NVIDIA H200", "NVIDIA H100", 13, 13.0, True, [], ["13.0"], {}]


def pairs():
    rng = random.Random(7)
    made = [[{name: value}, {name: now}] for name in ("gpu", "new") for value in VALUES for now in VALUES[1:8]]
    for _ in range(300):
        saved = {n: rng.choice([v, *VALUES]) for n, v in HERE.items() if rng.random() < 0.9}
        current = {n: rng.choice([v, v, "unknown", "other"]) for n, v in HERE.items() if rng.random() < 0.9}
        made.append([{**saved, "recipe": "x"}, current])
    return made + [[strange, HERE] for strange in ([], "x", 3, {}, True)]


def damaged(tmp_path):
    real = json.loads((CASES / "h200_real.json").read_text())
    some = next(k for k in real if k != "_metadata")
    changes = {
        "wild": {**real, "_metadata": {**real["_metadata"], "cudnn_version": "*"}},
        "extra": {**real, "_metadata": {**real["_metadata"], "recipe": "x"}},
        "empty_metadata": {**real, "_metadata": {}},
        "text_metadata": {**real, "_metadata": "x"},
        "null_metadata": {**real, "_metadata": None},
        "legacy": {**real, some: ["CudnnBf16GemmRunner", 3]},
        "legacy_negative": {**real, some: ["CudnnBf16GemmRunner", -1]},
        "legacy_true": {**real, some: ["CudnnBf16GemmRunner", True]},
        "short": {**real, some: ["R"]},
        "number": {**real, some: 4},
        "runner": {**real, some: [4, 4]},
        "bad_policy": {**real, some: ["R", 1, None]},
        "newer": {**real, some: ["R", 1, ["l2", "cold"], {"time_ms": 0.1}]},
    }
    for name, value in changes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return [*sorted(CASES.glob("*.json")), *sorted(tmp_path.glob("*.json"))]


@pytest.fixture(scope="module")
def asked(tuner, tmp_path_factory):
    """What was asked, and what FlashInfer answered, in one process."""
    environments = [{k: v for k, v in HERE.items() if k != "cutlass_dsl_version"}]
    environments += [{**environments[0], "cudnn_frontend_version": "1.32.0"}, {**environments[0], "gpu": "unknown"}]
    files = [file for file in damaged(tmp_path_factory.mktemp("files")) if file.name != "expected.json"]
    work = {"pairs": pairs(), "files": [[str(file), env] for file in files for env in environments]}
    return work, ask(tuner, work)


def test_records_are_classified_as_flashinfer_does(asked):
    work, answer = asked
    assert set(answer["fields"]) - {"cutlass_dsl_version"} == set(HERE) - {"cutlass_dsl_version"}
    for (saved, current), (hard, soft) in zip(work["pairs"], answer["classified"], strict=True):
        ours = compare(saved, current)
        assert {f.name: [f.saved, f.current] for f in ours if f.kind == "hard"} == hard, (saved, current)
        assert {f.name: [f.saved, f.current] for f in ours if f.kind == "soft"} == soft, (saved, current)


def test_files_are_loaded_where_we_say_so(asked):
    work, answer = asked
    agreed = 0
    for (name, env), (loaded, held) in zip(work["files"], answer["loaded"], strict=True):
        ours = judge_source(Path(name), env)
        if ours.verdict == "ok":
            assert (loaded, held) == (True, ours.entries), (name, env)
            agreed += 1
        elif ours.fields:  # refused for the record: FlashInfer says the same, whatever the entries look like
            assert loaded is False, (name, env)
            agreed += 1
        elif loaded is True:  # ours alone: without a record, without entries, or with one that FlashInfer lets pass
            assert inspect_cache(Path(name)).findings, (name, env)
    assert agreed > 20
