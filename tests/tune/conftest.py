"""Tests that run the real tuner: ranks under torchrun, the real AutoTuner on CPU, in an interpreter that has both.

What runs where: everything runs on the pinned FlashInfer; on the other one (PIPELINE_TUNE_OTHER) everything that its
AutoTuner has a part in, which is all but what is marked `once` (plans that are refused unread, interrupts, ranks that
stop or die, damage to caches, what ranks must agree on before FlashInfer is asked). Ranks are forked from an
interpreter that has imported torch and FlashInfer (warm.py), which saves most of the time; the cache that most tests
read, its replay and the killed ranks use processes that import for themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import ROOT, Tuner, write_plan
from warm import write_shim

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
def tuner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuner]:
    """The pinned FlashInfer, then the other one that one code base must serve (PIPELINE_TUNE_OTHER: its directory)."""
    other = os.environ.get("PIPELINE_TUNE_OTHER", "")
    if request.param == "other" and not Path(other or "/nonexistent").is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail("PIPELINE_TUNE_OTHER must name a directory with another FlashInfer: `make test` sets it")
        pytest.skip("no other FlashInfer: set PIPELINE_TUNE_OTHER to a directory that holds one")
    place = tmp_path_factory.mktemp("workspace")
    cold = Tuner(_python(), other if request.param == "other" else "", place)
    line = tempfile.mkdtemp()  # short: the path of a socket may have 107 characters
    settings = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "FLASHINFER_LOGGING_LEVEL": "warning", "HOME": str(place)}
    command = [cold.python, str(Path(__file__).with_name("warm.py")), "serve", f"{line}/warm"]
    with subprocess.Popen(command, env={**cold.environment(), **settings}, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield replace(cold, shim=str(write_shim(cold.python, f"{line}/warm", Path(line) / "python")))
        server.kill()
    shutil.rmtree(line)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "once: runs on the pinned FlashInfer only, since nothing of it depends on that")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `once` for the other FlashInfer."""
    again = [i for i in items if i.get_closest_marker("once") and "[other" in i.name]
    config.hook.pytest_deselected(items=again)
    items[:] = [item for item in items if item not in again]


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
    file = write_plan(make_plan(), place / "plan.json")
    done = tuner.run("pipeline.tune", file, place / "out", "--timeout", 30, warm=False)
    assert done.status == 0, done.stderr
    return place / "out", done.told
