"""A tuning that is ended in the middle, in a build stage and in a container: the next one takes up what was finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine


def end_in_the_middle(words: list[str], way: str, engine: Any, client: Any, home: Path) -> str:
    """Start, wait for the second of three ops, and end it: ourselves, or the container from outside."""
    before = {one.id for one in client.containers.list()}
    environment = {**os.environ, "DOCKER_HOST": engine.host, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-m", "pipeline", *words]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "2/3 tuning" in line:
                break
        if way == "container":
            (ours,) = (one for one in client.containers.list(filters={"label": "tuned-image-pipeline"})
                       if one.id not in before)  # fmt: skip
            ours.kill()
        else:
            process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(600) == (6 if way == "container" else 130), said
    return said


@pytest.mark.parametrize("way", ["stage", "container"])
def test_the_next_run_takes_up_what_was_finished(
    way: str, pipeline: Any, engine: Any, client: Any, home: Path, stored_root: Any
) -> None:
    seed = {"stage": "501", "container": "502"}[way]
    words = ["tiny", "--tp", "2", "--max-tokens", "512", "--seed", seed, "--tune-in", way]
    said = end_in_the_middle(["tune", *words], way, engine, client, home)
    unfinished = home / "tuned-image-pipeline" / "unfinished"
    if way == "container":
        assert "the tuning container ended with 137: ended by SIGKILL" in said
        assert "takes them up" in said
        assert [path.suffix for path in unfinished.glob("*/*")].count(".json") >= 1
    assert "Traceback" not in said
    name = f"tuned-test/resumed:{way}"
    done = pipeline("build", *words, "--image", name, "--json")
    assert done.status == 0, done.stderr
    try:
        assert "1/3 tuning" not in done.stderr
        assert "3/3 tuning" in done.stderr
        outcome = done.json()
        assert outcome["verdict"]["result"] == "pass"
        assert outcome["verdict"]["level"] == "replay"
        manifest = json.loads((stored_root(home, outcome) / outcome["key"] / "manifest.json").read_text())
        taken = {row["op"] for row in manifest["covered"] if row["note"] == "taken up from an interrupted run"}
        again = {row["op"] for row in manifest["covered"]} - taken
        assert taken
        assert again
        assert any("from an interrupted run: " in note for note in manifest["notes"])
        assert not list(unfinished.glob("*/*"))
    finally:
        client.images.remove(name, force=True)
