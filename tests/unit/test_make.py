"""The Makefile: values reach the commands as they are, and no shell reads them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(tmp_path: Path, *words: str, **environment: str) -> list[str]:
    """Run make with a stand-in for the environment that records its arguments, one a line."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for name in ("host.txt", "dev.txt", "image-cpu.txt"):
        (tmp_path / "requirements" / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done > "$(dirname "$0")/said"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / "ready").touch()
    done = subprocess.run(
        ["make", "-C", str(tmp_path), *words],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (python.parent / "said").read_text().splitlines()


@pytest.mark.parametrize(
    "value", ["$$(touch pwned)", "`touch pwned`", 'x"; touch pwned; "', "it's", "a b", 'x"y', "Ünï"]
)
def test_no_shell_reads_a_value(value: str, tmp_path: Path) -> None:
    said = make(tmp_path, "image", f"MODEL={value}", f"IMAGE={value}", f"BASE_IMAGE={value}")
    plain = value.replace("$$", "$")
    assert said[:4] == ["-m", "pipeline", "build", plain]
    assert f"--image={plain}" in said
    assert f"--base-image={plain}" in said
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("yes", True), ("0", False), ("no", False), ("", False), ("false", False)]
)
def test_switches_know_no(value: str, on: bool, tmp_path: Path) -> None:
    said = make(tmp_path, "image", "MODEL=tiny", f"RETUNE={value}", f"ROUND_UP={value}")
    assert ("--retune" in said, "--round-up" in said) == (on, on)


def test_what_is_not_set_is_not_handed_on(tmp_path: Path) -> None:
    assert make(tmp_path, "image", "MODEL=tiny") == ["-m", "pipeline", "build", "tiny"]
    assert make(tmp_path, "plan", "MODEL=tiny", "TP=2") == ["-m", "pipeline", "plan", "tiny", "--tp=2"]


def test_a_ci_s_own_variables_are_no_options_and_ours_have_a_prefix(tmp_path: Path) -> None:
    theirs = dict.fromkeys(("ARCH", "IMAGE", "CACHE", "DEVICE", "TAG", "KEY", "MODEL", "RETUNE"), "x86_64")
    assert make(tmp_path, "image", "MODEL=tiny", **theirs) == ["-m", "pipeline", "build", "tiny"]
    said = make(tmp_path, "image", **theirs, PIPELINE_MODEL="tiny", PIPELINE_ARCH="90a", PIPELINE_RETUNE="1")
    assert said == ["-m", "pipeline", "build", "tiny", "--arch=90a", "--retune"]
    assert make(tmp_path, "plan", "MODEL=tiny", "TP=4", PIPELINE_TP="2")[-1] == "--tp=4"


def test_ranges_of_buckets_arrive_whole(tmp_path: Path) -> None:
    said = make(tmp_path, "plan", "MODEL=tiny", "BUCKETS=1,2,4,8-256:8,272-512:16")
    assert said[-1] == "--buckets=1,2,4,8-256:8,272-512:16"


def test_what_shares_an_engine_stays_in_one_process(tmp_path: Path) -> None:
    """The pinned pytest and xdist use our distribution of tests: nothing else would show one that they ignore."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    code = "import os\ndef test_{}():\n    open('said', 'a').write('{} ' + os.environ['PYTEST_XDIST_WORKER'] + '\\n')\n"
    for name in ("docker/test_build", "docker/test_bases", "docker/test_release", "release/test_a"):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(code.format(number, name) for number in range(4)))
    words = re.search(r"--numprocesses \d --dist \w+", (ROOT / "Makefile").read_text())
    assert words
    command = [sys.executable, "-m", "pytest", "-q", *words[0].split(), "tests"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout
    ran = {tuple(line.split()) for line in (tmp_path / "said").read_text().splitlines()}
    workers = dict(ran)
    assert len(ran) == len(workers) == 4, ran
    assert workers["docker/test_build"] == workers["docker/test_bases"] != workers["docker/test_release"]


@pytest.mark.parametrize(
    ("pinned", "other"),
    [("0.6.16.post3", "0.7.4"), ("0.7.4", "0.6.16.post3"), ("0.6.16", "0.6.16.post3"), ("0.8.0", "0.6.16.post3")],
)
def test_the_tuner_is_tested_with_another_flashinfer_whichever_is_pinned(
    pinned: str, other: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements", "tests/tune", ".venv", ".venv-tune/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tests/tune/other-flashinfer", tmp_path / "tests/tune")
    for name in ("requirements/host.txt", "requirements/dev.txt", ".venv/ready", ".venv/dev"):
        (tmp_path / name).touch()
    text = (ROOT / "requirements/image-cpu.txt").read_text()
    text = re.sub(r"(?m)^(flashinfer-python==)\S+", rf"\g<1>{pinned}", text)
    (tmp_path / "requirements/image-cpu.txt").write_text(text)
    python = tmp_path / ".venv-tune/bin/python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/said\n')
    python.chmod(0o755)
    words = ["make", "-C", str(tmp_path), ".venv-tune/ready", "PYTHON=true"]
    subprocess.run(words, env={"PATH": os.environ["PATH"]}, check=True, capture_output=True)
    assert (
        (tmp_path / "said")
        .read_text()
        .splitlines()[-1]
        .endswith("--require-hashes --target .venv-tune/other --requirement .venv-tune/other.txt")
    )
    assert (tmp_path / ".venv-tune/other.txt").read_text().startswith(f"flashinfer-python=={other} --hash=sha256:")


def test_two_makes_at_once_make_one_environment(tmp_path: Path) -> None:
    """With a stand-in for Python, whose environment is slow to install."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "host.txt").touch()
    os.utime(tmp_path / "requirements" / "host.txt", (1, 1))
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "Makefile", tmp_path)
    inner = f'case "$*" in *install*) echo "$*" >> {tmp_path}/installed; sleep 1;; esac'
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin"; echo \'{inner}\' > "$3/bin/python"; '
        'chmod +x "$3/bin/python"; fi\n'
    )
    python.chmod(0o755)
    words = ["make", "-C", str(tmp_path), "check", f"PYTHON={python}"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    installed = (tmp_path / "installed").read_text().splitlines()
    assert len(installed) == 1 and "--require-hashes --requirement requirements/host.txt" in installed[0]
    assert "waiting for another process that makes .venv" in "".join(said)


def test_clean_leaves_what_git_tracks_and_nothing_that_make_made(tmp_path: Path) -> None:
    made = [".venv", ".venv-tune", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"]
    for name in (*made, "pipeline"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "-C", str(tmp_path), "clean"], check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "pipeline"]
