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
    assert not any(re.search(r"\d+\.\d+", run) for run in runs), "a version stands in versions.json alone"


def test_the_preset_reads_every_package_of_versions_json() -> None:
    preset = json.loads((ROOT / "renovate" / "versions.json").read_text(encoding="utf-8"))
    (manager,) = preset["customManagers"]
    (pattern,) = manager["matchStrings"]
    assert re.search(manager["managerFilePatterns"][0].strip("/"), "versions.json")
    assert not re.search(manager["managerFilePatterns"][0].strip("/"), "docker/versions.json")
    versions = load(ROOT)
    found = {
        f"{match['depName']}_VERSION": match["currentValue"]
        for match in re.finditer(pattern.replace("(?<", "(?P<"), versions.text)
    }
    assert found == {name: versions[name] for name in versions if name.endswith("_VERSION")}
    disabled = {
        name for rule in preset["packageRules"] if rule.get("enabled") is False for name in rule["matchDepNames"]
    }
    governors = {name: package for package, name in versions.governors().items()}
    for name in found:
        stem = name.removesuffix("_VERSION")
        if stem not in disabled and stem != "FLASHINFER":
            assert governors[name] == stem.lower().replace("_", "-")
    assert "{{#if (equals depName 'FLASHINFER')}}flashinfer-python" in manager["packageNameTemplate"]


def test_the_bot_is_told_which_command_to_run() -> None:
    preset = json.loads((ROOT / "renovate" / "versions.json").read_text(encoding="utf-8"))
    tasks = [rule["postUpgradeTasks"]["commands"] for rule in preset["packageRules"] if "postUpgradeTasks" in rule]
    assert tasks == [["pipeline versions bump --refresh"]]
