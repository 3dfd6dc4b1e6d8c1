"""Engine tests get a real Docker Engine: the one that answers, else a private one that they start and leave running."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_images import NAME, remove_images

from pipeline.daemon import Engine, NoEngine, ensure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine. A missing one fails the run; only a person who is not root, outside CI, may go without."""
    try:
        return ensure()
    except NoEngine as error:
        if os.environ.get("CI") != "true" and os.geteuid() != 0:
            pytest.skip(f"{error.message}; {error.hint}")
        raise


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str
    seconds: float

    def json(self) -> dict[str, Any]:
        return json.loads(self.stdout)


@pytest.fixture(scope="session")
def client(engine: Any) -> Iterator[Any]:
    from pipeline.daemon import connect

    made = connect(engine)
    yield made
    remove_images(made)
    made.close()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache home of our own, so that the store is empty, with the wheels and base facts that are there already."""
    from pipeline.home import cache_home

    own = tmp_path_factory.mktemp("home")
    shared = cache_home()
    (own / "tuned-image-pipeline").mkdir()
    (shared / "wheels").mkdir(parents=True, exist_ok=True)
    (own / "tuned-image-pipeline" / "wheels").symlink_to(shared / "wheels")
    return own


@pytest.fixture(scope="session")
def pipeline(engine: Any, home: Path) -> Any:
    def run(*words: str, env: dict[str, str] | None = None, timeout: float = 900) -> Done:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            cwd=ROOT,
            env={**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    return run


@pytest.fixture(scope="session")
def plan_of() -> Any:
    """A plan for two CPU ranks of this machine and the pinned FlashInfer, which is the one in the image."""
    from pipeline.contract.plan import Layout, OpPlan, Plan
    from pipeline.versions import load

    def make(model: str, *ops: OpPlan) -> Plan:
        version = load(ROOT)["FLASHINFER_VERSION"]
        return Plan(model, "cpu", f"cpu-{platform.machine()}", version, Layout(tp=2), ops)

    return make


@pytest.fixture(scope="session")
def built(pipeline: Any, client: Any) -> dict[str, Any]:
    done = pipeline("build", "tiny", "--tp", "2", "--image", NAME, "--json")
    assert done.status == 0, done.stderr
    outcome = done.json()
    outcome["stderr"] = done.stderr
    return outcome


@pytest.fixture(scope="session")
def stored_root() -> Any:
    """The root in the store that an image was baked from: several hold its key, one its manifest."""
    from pipeline.contract.digest import sha256_file

    def find(home: Path, built: dict[str, Any]) -> Path:
        for root in (home / "tuned-image-pipeline" / "warm-ups").glob("*/root/opt/flashinfer_autotune_cache"):
            manifest = root / built["key"] / "manifest.json"
            if manifest.is_file() and sha256_file(manifest) == built["verdict"]["manifest_sha256"]:
                return root
        raise AssertionError("the store does not hold what was baked")

    return find
