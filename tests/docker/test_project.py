"""`pipeline init`: a project of one's own, outside of the checkout, becomes an image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_images import OWN

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
NAME = f"{OWN}/project:one"


def test_a_new_project_builds_an_image(engine: Any, client: Any, home: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def pipeline(*words: str, cwd: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    project = tmp_path / "images"
    pipeline("init", "images", cwd=tmp_path)
    small = ("--tp", "1", "--buckets", "1", "--ops", "qkv", "--compare", "off", "--image", NAME, "--json")
    outcome = json.loads(pipeline("build", "tiny", *small, cwd=project))
    try:
        assert outcome["verdict"]["result"] == "pass" and client.images.get(NAME).id == outcome["image_id"]
    finally:
        client.images.remove(NAME, force=True)
