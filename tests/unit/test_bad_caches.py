"""What must not be baked, handed to `pipeline build CACHE=` as anyone may: refused with 7 and every reason, by no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cache_samples as samples
import pytest

from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "caches"
SMALL = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"


def pipeline(home: Path, *words: object, bounded: bool = False) -> subprocess.CompletedProcess[str]:
    """The command with an engine address at which nobody answers; `bounded`: in 512 MiB of address space."""
    start = (
        ["-c", f"{SMALL}from pipeline.__main__ import main; sys.exit(main(sys.argv[1:]))"]
        if bounded
        else ["-m", "pipeline"]
    )
    env = {**os.environ, "DOCKER_HOST": f"unix://{home}/nobody.sock", "XDG_CACHE_HOME": str(home / "cache")}
    command = [sys.executable, *start, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def with_file(place: Path, data: bytes) -> None:
    (place / CACHE_FILE).write_bytes(data)


def huge(path: Path) -> None:
    """A gigabyte of JSON, or what begins so: the rest is a hole."""
    path.write_bytes(b'{"a": [' + b"1," * 1000)
    with path.open("r+b") as stream:
        stream.truncate(1 << 30)


def edit(place: Path, change: object) -> None:
    manifest = json.loads((place / MANIFEST_FILE).read_text())
    change(manifest)  # type: ignore[operator]
    (place / MANIFEST_FILE).write_text(json.dumps(manifest))


DAMAGE = {
    "other bytes": (lambda p: with_file(p, (CASES / "h200_real.json").read_bytes()), "bytes, the manifest says"),
    "gigabyte": (lambda p: huge(p / CACHE_FILE), "has 1,073,741,824 bytes, more than"),
    "gigabyte of manifest": (lambda p: huge(p / MANIFEST_FILE), "has 1,073,741,824 bytes, more than"),
    "link": (lambda p: (p / "more").symlink_to("/etc/passwd"), "is not a regular file"),
    "leads out": (lambda p: edit(p, lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0"}})), "a file named '../x'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_nothing_is_baked_from_it(tmp_path: Path, kind: str) -> None:
    damage, said = DAMAGE[kind]
    damage(samples.write(tmp_path / "root", "NVIDIA H200"))
    done = pipeline(tmp_path, "build", "tiny", "--cache", tmp_path / "root", bounded="gigabyte" in kind)
    assert done.returncode == 7, done.stderr
    assert said in done.stderr and "nothing was baked" in done.stderr and "hint: " in done.stderr


def test_every_reason_of_every_root_at_once(tmp_path: Path) -> None:
    one, two = samples.write(tmp_path / "one", "NVIDIA H200"), samples.write(tmp_path / "two", "NVIDIA H100")
    (one / "stray").write_text("x")
    edit(two, lambda m: [m.update(started=3, ended=4), m["plan"].update(seed="x")])
    done = pipeline(tmp_path, "build", "tiny", "--cache", f"{tmp_path / 'one'},{tmp_path / 'two'}")
    assert done.returncode == 7
    for said in ("stray is not in the manifest", "$.started: 3", "$.ended: 4", "$.plan.seed", str(tmp_path / "two")):
        assert said in done.stderr


def test_a_gigabyte_is_explained_and_compared_in_bounded_memory(tmp_path: Path) -> None:
    huge(tmp_path / "big.json")
    for words in (
        ("explain", "big.json"),
        ("cache", "diff", "big.json", "big.json"),
        ("cache", "merge", "big.json", "-o", "out"),
    ):
        done = pipeline(tmp_path, *(tmp_path / w if w in ("big.json", "out") else w for w in words), bounded=True)
        assert (
            done.returncode == 7 and "too large" in done.stdout + done.stderr
        ) or "more than the limit" in done.stderr
    done = pipeline(tmp_path, "explain", CASES / "h200_real.json", "--env", tmp_path / "big.json", bounded=True)
    assert done.returncode == 2 and "more than the limit" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("--cache", "/no/such"), ("--cache", ",")])
def test_what_names_no_cache_is_a_usage_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = pipeline(tmp_path, "build", "tiny", *words)
    assert done.returncode == 2 and "hint: " in done.stderr
