"""Tests that run the real tuner: ranks under torchrun, the real AutoTuner on CPU, in an interpreter that has both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_harness import ROOT, Tuner, write_plan

from pipeline.contract.plan import Layout, OpPlan, Plan

F32 = {"a": "float32", "b": "float32", "out": "float32"}
BF16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}


def _python() -> str:
    found = os.environ.get("PIPELINE_TUNE_PYTHON") or str(ROOT / ".venv-tune" / "bin" / "python")
    if not Path(found).exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{found} does not exist: `make test` makes it")
        pytest.skip("no interpreter with torch and FlashInfer: set PIPELINE_TUNE_PYTHON")
    return found


@pytest.fixture(scope="session", params=["pinned", "other"])
def tuner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuner:
    """The pinned FlashInfer, then the other one that one code base must serve (PIPELINE_TUNE_OTHER: its directory)."""
    other = os.environ.get("PIPELINE_TUNE_OTHER", "")
    if request.param == "other" and not Path(other or "/nonexistent").is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail("PIPELINE_TUNE_OTHER must name a directory with another FlashInfer: `make test` sets it")
        pytest.skip("no other FlashInfer: set PIPELINE_TUNE_OTHER to a directory that holds one")
    return Tuner(_python(), other if request.param == "other" else "", tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def record(tuner: Tuner) -> Any:
    """The record of this machine."""
    return tuner.record()


@pytest.fixture(scope="session")
def make_plan(record: Any) -> Callable[..., Plan]:
    """A small plan for this machine, changed by keywords."""

    def make(**changes: Any) -> Plan:
        ops = (
            OpPlan("wide", "cpu_mm", {"n": 192, "k": 64}, F32, (1, 8, 32)),
            OpPlan("narrow", "cpu_mm", {"n": 64, "k": 96}, BF16, (1, 16)),
        )
        fields: dict[str, Any] = {
            "model": "test",
            "device": "cpu",
            "arch": record["arch"],
            "flashinfer_version": record["flashinfer"]["flashinfer_version"],
            "layout": Layout(tp=2),
            "ops": ops,
            "seed": 11,
        }
        return Plan(**{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def tuned(tuner: Tuner, make_plan: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A cache that two ranks tuned, and what the tuner told; for tests that only read it."""
    place = tmp_path_factory.mktemp("tuned")
    done = tuner.run("pipeline.tune", write_plan(make_plan(), place / "plan.json"), place / "out", "--timeout", 30)
    assert done.status == 0, done.stderr
    return place / "out", done.told
