"""A real vLLM on CPU in containers of a Docker Engine. One image serves all tests: its starts take minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from real_vllm import IMAGE, ROOT, Pipeline


@pytest.fixture(scope="session")
def pipeline() -> Pipeline:
    """Run `pipeline` on the checkout."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="session")
def built(pipeline: Pipeline) -> Iterator[dict[str, Any]]:
    """The outcome of `pipeline build tiny --server vllm`: warmed up, baked, and started twice."""
    done = pipeline("build", "tiny", "--server", "vllm", "--image", IMAGE, "--json")
    assert done.returncode == 0, done.stderr[-6000:]
    yield {**json.loads(done.stdout), "said": done.stderr}
    pipeline("clean")
