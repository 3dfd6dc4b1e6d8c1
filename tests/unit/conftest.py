"""Unit tests start no process, reach no network and no engine; what needs one asks for it by a fixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long examples take says nothing where other processes want the processors too. The same code is tried on the same
# examples each time: a run says something of the code, not of chance. `--hypothesis-profile=default` draws others.
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_engine_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A private engine of this user must not change what a unit test sees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache-home"))


@pytest.fixture
def run_tool() -> Callable[..., None]:
    """Run a development tool of this environment on the checkout; fail with what it printed."""

    def run(name: str, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", name, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    return run
