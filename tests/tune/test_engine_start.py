"""An engine's own start outside containers: a stand-in writes the files, the real record judges them.

The stand-in is that of the engine tests, told its record by a file so that it imports no FlashInfer a second time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import ROOT, Done, Tuner, error_line, only_key, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.contract.plan import EngineRun, Layout, Plan

pytestmark = [pytest.mark.flashinfer, pytest.mark.once]
STAND_IN = ROOT / "tests" / "engine" / "stand_in_engine.py"
CONFIG = {"config.json": '{"architectures": ["StandInForCausalLM"]}'}


@pytest.fixture
def start(
    tuner: Tuner, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Done, Path]]:
    def tune(name: str, version: str, ranks: int, *more: str, max_wait: float = 60) -> tuple[Done, Path]:
        script = f"#!{tuner.python}\n{STAND_IN.read_text()}"
        for path, text in (("bin/vllm", script), ("site/sglang/launch_server.py", script)):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        (tmp_path / "bin" / "vllm").chmod(0o755)
        facts = tmp_path / "site" / f"{name}-{version}.dist-info" / "METADATA"
        facts.parent.mkdir(exist_ok=True)
        facts.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (tmp_path / "record.json").write_text(json.dumps(record["flashinfer"]))
        model = str(tmp_path / "models" / "x")
        words = (model,) if name == "vllm" else ("--model-path", model)
        run = EngineRun(name, version, model, (*words, "--tp", str(ranks), *more), {"STAND_IN": "1"}, CONFIG)
        flashinfer = record["flashinfer"]["flashinfer_version"]
        plan = Plan("x", "cpu", record["arch"], flashinfer, Layout(tp=ranks), (), engine=run)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        told = replace(tuner, path=os.pathsep.join(filter(None, (str(tmp_path / "site"), tuner.path))))
        monkeypatch.setattr(Tuner, "environment", with_record(tmp_path / "record.json"))
        file = write_plan(plan, tmp_path / "plan.json")
        out = tmp_path / "out"
        return told.run("pipeline.tune", file, out, "--engine-max-wait", max_wait, warm=False), out

    return tune


def with_record(path: Path) -> Any:
    plain = Tuner.environment
    return lambda *words, **named: {**plain(*words, **named), "STAND_IN_RECORD": str(path)}


@pytest.mark.parametrize(
    ("name", "version", "ranks", "files"),
    [
        ("vllm", "0.28.0", 2, ["autotune_configs.json"]),
        ("vllm", "0.33.0", 2, ["autotune_configs_dp0_rank0.json", "autotune_configs_dp0_rank1.json"]),
        ("vllm", "0.33.0", 1, ["manifest.json", *["entries"] * 3]),
        ("sglang", "0.5.23", 2, ["rank_tp0_pp0_dp0.json", "rank_tp1_pp0_dp0.json"]),
    ],
)
def test_what_an_engine_leaves_becomes_a_key(
    start: Callable[..., tuple[Done, Path]], name: str, version: str, ranks: int, files: list[str]
) -> None:
    done, out = start(name, version, ranks)
    assert done.status == 0, done.stderr
    assert [str(finding) for finding in check_root(out)[1]] == []
    manifest = read_manifest(out)
    assert [rank.entries for rank in manifest.ranks] == [3] * ranks
    assert manifest.strategy_reason.startswith(f"{name} {version} tuned in its own start")
    place = only_key(out) / "engine" / manifest.options["layout"]["directory"]
    found = sorted(path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file())
    assert found == sorted(files)
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o644}


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("die", 6, ["vllm ended with exit code 1 before it was ready", "out of memory, as if"]),
        ("hang", 6, ["vllm was not ready within 4 s", "stand-in: starting", "--tune-max-wait"]),
        ("tunes-nothing", 6, ["was ready and left no tuned tactics", "--moe-backend"]),
        ("disagree", 7, ["rank0.json and autotune_configs_dp0_rank1.json differ", "stand_in_gemm"]),
        ("two-caches", 7, ["left 2 caches, and a key holds one"]),
        ("other-record", 7, ["cuda_version is 99.9, the record of this stage says"]),
        ("one-rank", 7, ["1 files (ranks), and its arguments make 2 ranks"]),
    ],
)
def test_what_must_not_be_baked_is_not(
    start: Callable[..., tuple[Done, Path]], more: str, status: int, said: list[str]
) -> None:
    began = time.monotonic()
    done, out = start("vllm", "0.33.0", 2, "--stand-in", more, max_wait=4 if more == "hang" else 600)
    assert done.status == status, done.stderr
    assert error_line(done) and all(one in done.stderr for one in said), done.stderr
    assert "Traceback" not in done.stderr and not list(out.glob("*/*/*"))
    assert time.monotonic() - began < 450, "a long bound must not hide that it died"


def test_another_model_at_the_path_is_not_overwritten(start: Callable[..., tuple[Done, Path]], tmp_path: Path) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "models" / "x" / "config.json").write_text("{}")
    done, _ = start("vllm", "0.28.0", 2)
    assert done.status == 2 and "is another model's" in done.stderr
    assert (tmp_path / "models" / "x" / "config.json").read_text() == "{}"
