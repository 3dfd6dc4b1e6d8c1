"""A real vLLM on CPU in containers of a Docker Engine. One image serves all tests: its starts take minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_vllm import ARGS, IMAGE, ROOT, Pipeline

sys.path.append(str(ROOT / "tests" / "release"))

import release_debian
from release_registries import Running, running

from pipeline.daemon import Engine, connect, ensure


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine that answers, else a private one, which stays."""
    return ensure()


@pytest.fixture(scope="session")
def client(engine: Engine) -> Iterator[Any]:
    """A client of it."""
    made = connect(engine)
    yield made
    made.close()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real registry on the loopback."""
    release_debian.ensure("docker-registry")
    with running(tmp_path_factory.mktemp("registry")) as one:
        yield one


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache home with an empty store; wheels are those that this machine has already."""
    from pipeline.home import cache_home

    own = tmp_path_factory.mktemp("home") / "tuned-image-pipeline"
    wheels = cache_home() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    own.mkdir()
    (own / "wheels").symlink_to(wheels)
    return own


@pytest.fixture(scope="session")
def pipeline(engine: Engine, home: Path) -> Pipeline:
    """Run `pipeline` on the checkout, with that cache home."""
    environment = {**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home.parent)}

    def run(*words: str, host: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *words], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**environment, **({"DOCKER_HOST": host} if host else {})},
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def built(pipeline: Pipeline, client: Any) -> Iterator[dict[str, Any]]:
    """The outcome of `pipeline build tiny --server vllm`: warmed up, baked, and started twice."""
    done = pipeline("build", "tiny", "--server", "vllm", "--server-args", ARGS, "--image", IMAGE, "--json")
    assert done.returncode == 0, done.stderr[-6000:]
    print(done.stderr)  # seconds by phase: shown where a test fails, or with -s
    yield {**json.loads(done.stdout), "said": done.stderr}
    client.images.remove(IMAGE, force=True)
