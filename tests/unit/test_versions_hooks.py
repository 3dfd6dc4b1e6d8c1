"""What runs the check for pull requests: pre-commit hooks, a workflow, a Renovate preset."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pipeline.commands import commands
from pipeline.versions import load

ROOT = Path(__file__).resolve().parents[2]
REACHED = ["versions.json", "docker/Dockerfile", "requirements/host.txt", "templates/Dockerfile.j2", "Dockerfile.gpu"]


def hooks() -> dict[str, dict[str, object]]:
    return {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}


def test_hooks_call_commands_that_are_there() -> None:
    for hook in hooks().values():
        program, *words = str(hook["entry"]).split()
        assert program in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
        assert tuple(words) in dict(commands())
        assert hook["pass_filenames"] is False


@pytest.mark.parametrize("path", REACHED)
def test_the_check_hook_sees_every_file_that_it_judges(path: str) -> None:
    assert re.search(str(hooks()["pipeline-check"]["files"]), path)


def test_our_own_hooks_use_what_make_installed() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    own = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert all(repo["repo"] == "local" for repo in config["repos"])
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in own)


def test_the_workflow_runs_the_check_with_annotations_and_no_rights() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))
    triggers = workflow[True]  # `on` is a boolean in YAML 1.1
    assert "pull_request" in triggers
    assert workflow["permissions"] == {"contents": "read"}
    runs = [step.get("run", "") for step in workflow["jobs"]["check"]["steps"]]
    assert runs[-1] == "python -m pipeline versions check --format github"
    assert "--require-hashes" in runs[-2]
    assert not any(re.search(r"\d+\.\d+", run) for run in runs), "a version stands in versions.json alone"


def preset() -> dict[str, object]:
    return json.loads((ROOT / "renovate" / "versions.json").read_text(encoding="utf-8"))


def test_the_preset_opens_one_pull_request_for_a_name() -> None:
    versions = load(ROOT)
    found = {}
    for manager in preset()["customManagers"]:
        assert re.search(manager["managerFilePatterns"][0].strip("/"), "versions.json")
        assert not re.search(manager["managerFilePatterns"][0].strip("/"), "docker/versions.json")
        for pattern in manager["matchStrings"]:
            for match in re.finditer(pattern.replace("(?<", "(?P<"), versions.text):
                found[match["currentValue"]] = manager["packageNameTemplate"]
    governed = {versions[name]: what.packages[0] for name, what in versions.governs.items() if what.packages}
    cuda = governed.pop(versions["CUDA_VERSION"])  # a person moves it: torch is made for one CUDA
    assert cuda == "cuda-toolkit" and found == governed


def test_the_preset_opens_one_pull_request_for_a_lock() -> None:
    """Renovate's pip-compile manager runs the command in a lock's header; only these options are known to it."""
    known = {"--generate-hashes", "--universal", "--python-version", "--output-file"}
    patterns = [pattern.strip("/") for pattern in preset()["pip-compile"]["managerFilePatterns"]]
    versions = load(ROOT)
    for name, lock in versions.locks.items():
        path = f"requirements/{name}.txt"
        assert any(re.search(pattern, path) for pattern in patterns) == (lock.system == "any system")
        text = (ROOT / path).read_text(encoding="utf-8")
        command = re.match(r"(#.*?\n)+# {4}(?P<command>\S*)(?P<arguments> .*?)?\n", text)
        assert command and command["command"] == "uv"
        if lock.system == "any system":
            words = command["arguments"].split()
            assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
            assert words[-1] == f"{name}.in"


def test_the_bot_gets_the_command_to_run() -> None:
    tasks = [rule["postUpgradeTasks"]["commands"] for rule in preset()["packageRules"] if "postUpgradeTasks" in rule]
    assert tasks == [["pipeline versions bump --refresh"]]
