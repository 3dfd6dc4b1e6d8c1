"""Every rendered Dockerfile is linted, also as the host finishes it for GPU steps and several keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.image.bake import Layer, Runs, finished

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "docker").glob("Dockerfile*"))
BASES = ["Dockerfile", "Dockerfile.cuda", "Dockerfile.overlay"]  # which the host finishes; the others are whole


def hadolint(text: bytes, *words: str) -> str:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [program, "--no-color", "--config", ROOT / ".hadolint.yaml", *words, "-"],
        input=text, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.decode()


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    text = (ROOT / "docker" / name).read_bytes()
    assert hadolint(text) == ""
    if name not in BASES:
        return
    layers = [Layer("cache-0", "/a"), Layer("cache-1", "/b/c", linked=False)]
    assert hadolint(finished(text, layers, {"A": "b$c d"}, Runs("1000:5", ("serve",), ("a",)))) == ""


def test_hadolint_would_say_something() -> None:
    assert "DL3006" in hadolint(b"FROM debian\n")


def test_there_is_a_dockerfile_for_every_flavour() -> None:
    assert set(BASES) <= set(FILES)


def test_the_cuda_image_s_compilers_stay_in_the_stage_that_tunes() -> None:
    text = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    stages = dict(part.split(" AS ", 1)[::-1] for part in text.split("\nFROM ")[1:])
    origin = {body.split("\n", 1)[0]: base for body, base in stages.items()}
    assert origin["final"] == "runtime"
    assert origin["tuner"] == "bare"
    assert origin["bare"] == "toolchain"
    bodies = {body.split("\n", 1)[0]: body for body in stages}
    assert [name for name, body in bodies.items() if "from=compiler," in body] == ["toolchain"]
