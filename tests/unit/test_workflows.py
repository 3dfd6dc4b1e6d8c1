"""The workflows: actions pinned by digest, least permissions, and steps that people can type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted([*(ROOT / ".github" / "workflows").glob("*.yml"), *(ROOT / "examples" / "github").glob("*.yml")])
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
# The variables that the Makefile knows: in the lists from PLAN to NAMES, `TP=tp` or a plain name.
LISTS = re.search(r"^PLAN := .*?^export ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job["steps"]


def test_there_are_workflows() -> None:
    assert {path.name for path in WORKFLOWS} >= {"check.yml", "release.yml", "test.yml"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_digest_and_say_their_version(path: Path) -> None:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    wrong = [line for line in lines if not re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)]
    assert wrong == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_are_bounded_and_may_do_little(path: Path) -> None:
    whole = read(path)
    assert whole["permissions"] in ({}, {"contents": "read"})
    assert "group" in whole["concurrency"]
    for name, job in whole["jobs"].items():
        assert job["timeout-minutes"] <= 240, name
        assert set(job.get("permissions", {})) <= {"contents", "packages"}, name
        assert job.get("permissions", {}).get("contents", "read") == "read", name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_input_reaches_a_shell_and_no_secret_an_argument(path: Path) -> None:
    wrong = [step["run"] for step in steps(path) if "run" in step and "${{" in step["run"]]
    assert wrong == [], "values go through the environment"
    kept = [step for step in steps(path) if str(step.get("uses", "")).startswith("actions/checkout@")]
    assert kept and all(step["with"]["persist-credentials"] is False for step in kept)


def test_the_steps_of_a_release_are_make_targets() -> None:
    made = [
        step["run"] for step in steps(ROOT / ".github" / "workflows" / "release.yml") if "make " in step.get("run", "")
    ]
    assert len(made) >= 6
    assert LISTS is not None
    for line in made:
        target, *settings = line.split()[1:]
        assert target in TARGETS, line
        known = set(re.findall(r"\b[A-Z_]+\b", LISTS[0]))
        assert {word.partition("=")[0] for word in settings} <= known, line


def test_the_gpu_runner_is_not_the_one_that_releases() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert "gpu" in jobs["tune"]["runs-on"]
    assert jobs["release"]["needs"] == "tune"
    assert jobs["release"]["runs-on"].startswith("ubuntu-")


def test_ci_lints_and_tests_as_the_readme_says_on_a_bare_debian() -> None:
    path = ROOT / ".github" / "workflows" / "test.yml"
    (job,) = read(path)["jobs"].values()
    assert job["container"]["image"] == "debian:12" and "--privileged" in job["container"]["options"]
    runs = [step["run"] for step in steps(path) if "run" in step]
    assert runs[-2:] == ["make lint", ".ci/run"]
    assert [line for line in runs if "apt-get" in line] == [
        "apt-get -qq update && apt-get -qq --yes install git make python3 >/dev/null"
    ]
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1].removeprefix("exec ")
    assert command == "make test" and f"`{command}`" in (ROOT / "README.md").read_text(encoding="utf-8")
