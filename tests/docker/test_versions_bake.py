"""versions.json as a bake variable file: what is in it reaches the build."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.daemon import Engine
from pipeline.daemon.buildx import environment
from pipeline.run import clean_environment
from pipeline.versions import load
from pipeline.versions.bump import edited
from pipeline.versions.source import read

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine


def baked(engine: Engine, versions: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    words = ["-f", "docker/docker-bake.hcl", "-f", str(versions), "--print", "final"]
    done = subprocess.run(
        ["docker", "buildx", "bake", *words],
        cwd=ROOT,
        env={**clean_environment(environment(engine)), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["target"]["final"]["args"]


def test_bake_takes_the_file_as_it_is(engine: Engine) -> None:
    versions = load(ROOT)
    args = baked(engine, ROOT / "versions.json")
    assert args and all(args[name] == versions[name] for name in args)
    assert {"BASE_IMAGE", "FLASHINFER_VERSION", "TORCH_VERSION"} <= set(args)


def test_the_values_come_from_versions_json(engine: Engine, tmp_path: Path) -> None:
    moved = read(edited(load(ROOT).text, {"TORCH_VERSION": "9.9.9", "PYTHON_IMAGE_VERSION": "3.11.99"}).encode())
    (tmp_path / "versions.json").write_text(moved.text, encoding="utf-8")
    args = baked(engine, tmp_path / "versions.json")
    assert args["TORCH_VERSION"] == "9.9.9"
    assert args["BASE_IMAGE"] == moved["BASE_IMAGE"] == "python:3.11.99-slim-bookworm"


def test_the_environment_overrides(engine: Engine) -> None:
    args = baked(engine, ROOT / "versions.json", {"TORCH_VERSION": "8.8.8"})
    assert args["TORCH_VERSION"] == "8.8.8"
