"""The scripts that measure, as far as no GPU is needed: they import, say what they take, and refuse what they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [f"tests.gpu.{path.stem}" for path in sorted((ROOT / "tests" / "gpu").glob("*.py"))]


def ran(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", name, *words],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*SCRIPTS, "bench"])
def test_help_says_what_a_script_takes_and_measures_nothing(name: str) -> None:
    done = ran(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("name", [*SCRIPTS, "bench"])
def test_a_word_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    done = ran(name, str(tmp_path / "a"), str(tmp_path / "b"), "--stratgies")
    assert done.returncode == 2
    assert "usage: " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [(), ("--env", "NCCL_NVLS_ENABLE=0")])
def test_no_server_starts_on_two_gpus_unless_multicast_is_kept_away(given: tuple[str, ...], tmp_path: Path) -> None:
    words = ("base", "image", str(tmp_path / "out"), "--model", ".", *given, "--", "--model", "/m", "-tp", "2")
    done = ran("tests.gpu.server_starts", *words)
    assert done.returncode == 2
    assert ("NCCL_NVLS_ENABLE=0" in done.stderr) is not bool(given)
    assert "NVSHMEM_DISABLE_NVLS=1" in done.stderr
    assert "fuse_allreduce_rms" in done.stderr
    assert not (tmp_path / "out").exists()
