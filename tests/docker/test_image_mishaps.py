"""What goes wrong around an image: damage in the store, hand-edited files, strays, layers on top."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

NAME = "tuned-test/tiny:two"
OURS = {"label": "tuned-image-pipeline"}


def containers(client: Any) -> set[str]:
    return {c.id for c in client.containers.list(all=True)}


def test_a_damaged_store_entry_is_tuned_again(pipeline: Any, home: Path, stored_root: Any, client: Any) -> None:
    small = ("--tp", "1", "--buckets", "1,2", "--judge", "off")
    words = ("image", "tiny", *small, "--image", "tuned-test/tiny:mended", "--json")
    first = pipeline(*words)
    assert first.status == 0, first.stderr
    path = stored_root(home, first.json()) / first.json()["key"] / "autotune_configs.json"
    path.write_bytes(path.read_bytes()[:-20])
    try:
        done = pipeline(*words)
        assert done.status == 0, done.stderr
        assert "the stored cache is damaged, tuning again" in done.stderr
        assert done.json()["reused"] is False
        assert done.json()["verdict"]["result"] == "pass"
    finally:
        client.images.remove("tuned-test/tiny:mended", force=True)


def test_a_layer_of_no_bytes_on_top_is_found(built: dict[str, Any], pipeline: Any, client: Any) -> None:
    container = client.containers.create(NAME, ["touch", "/extra"], entrypoint=[], user="0:0")
    try:
        container.start()
        container.wait()
        container.commit("tuned-test/tiny", "touched")
    finally:
        container.remove(force=True)
    try:
        done = pipeline("verify", "tuned-test/tiny:touched", "--level", "static")
        assert done.status == 7
        assert "the last layers weigh" in done.stderr
    finally:
        client.images.remove("tuned-test/tiny:touched", force=True)


def test_a_base_without_python_leaves_no_container(pipeline: Any, client: Any, tmp_path: Path) -> None:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    client.api.import_image_from_data(buffer.getvalue(), repository="tuned-test/nothing", tag="1")
    before = containers(client)
    try:
        done = pipeline("build", "tiny", "--base-image", "tuned-test/nothing:1")
        assert done.status == 2
        assert "has no python3" in done.stderr
        assert containers(client) - before == set()
    finally:
        client.images.remove("tuned-test/nothing:1", force=True)


def test_hand_edited_rendered_files_are_refused(built: dict[str, Any], engine: Any, home: Path, tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    copy = tmp_path / "tree"
    for name in ("pipeline", "docker", "templates", "requirements"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "versions.json", copy)
    dockerfile = copy / "docker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN touch /evil\n")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "build", "tiny"], cwd=copy, capture_output=True, text=True, check=False,
        env={**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "docker/Dockerfile differ" in done.stderr
    assert "pipeline versions sync" in done.stderr


@pytest.mark.parametrize("name", ["a b", "UPPER:x", "ünï"])
def test_a_name_that_no_image_has_is_refused_before_the_engine_is_asked(name: str, pipeline: Any) -> None:
    done = pipeline("verify", name)
    assert done.status == 2
    assert "cannot name an image" in done.stderr


def test_a_start_is_bounded_and_one_that_died_is_not_waited_for(
    built: dict[str, Any], pipeline: Any, client: Any
) -> None:
    """The bound is that of start and replay together; what was printed so far is shown, and nothing is left running."""
    from pipeline.image.contain import ContainerTooSlow, Sandbox, run_to_end

    image = built["image_id"]
    began = time.monotonic()
    ended = run_to_end(client, image, ["sh", "-c", "echo lost >&2; exit 137"], Sandbox(), max_wait=600)
    assert (ended.status, ended.stderr) == (137, ("lost",)) and time.monotonic() - began < 300
    with pytest.raises(ContainerTooSlow) as caught:
        run_to_end(client, image, ["sh", "-c", "echo so far; sleep 600"], Sandbox(), max_wait=8)  # its start too
    assert list(caught.value.details) == ["so far"]
    done = pipeline("verify", image, "--startup-max-wait", "1")
    assert done.status == 5 and "did not end within" in done.stderr and "hint: raise the bound" in done.stderr
    ours = client.containers.list(all=True, filters={"label": "tuned-image-pipeline=running", "ancestor": image})
    assert ours == []
