"""The examples for schedulers: commands that exist, and the facts that matter. Slurm's are run by tests/release."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.__main__ import main, parser_for
from pipeline.registry import client
from pipeline.release.matrix import read_matrix

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").iterdir())
TEXTS = [*SCRIPTS, *sorted(EXAMPLES.glob("*/*.y*ml"))]


def job(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())


def commands(text: str) -> Iterator[list[str]]:
    """Every call of `python -m pipeline`, with a word in place of each variable."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for found in re.finditer(r"-m pipeline (.+?)(?=\)|$|[|>;]| \|\||&&)", joined, re.MULTILINE):
        words = re.sub(r"\$\{(SIGN|NAME):\+([^}]*)\}", r"\2", found[1])
        words = re.sub(r'"\$\{words\[@\]\}"', "--matrix release.toml --registry r.example", words)
        yield shlex.split(re.sub(r'"\$[^"]*"', "value", words))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_is_one_that_the_pipeline_has(path: Path) -> None:
    found = list(commands(path.read_text()))
    for words in found:
        parser_for(words).parse_args(words)
    assert found or path.name == "finish.yaml", "its command is a list"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_read_by_bash(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", ["example", "page"])
def test_a_matrix_that_users_copy_can_be_planned(source: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """All of it: models, layouts, tags that tell the images apart; caches that users have yet to make are missing."""
    path = EXAMPLES / "release.toml"
    if source == "page":
        page = (ROOT / "docs" / "reference" / "release.md").read_text()
        (block,) = re.findall(r"## The matrix\n\n((?:    .*\n|\n)+)", page)
        path = tmp_path / "release.toml"
        path.write_text(re.sub(r"^    ", "", block, flags=re.MULTILINE))
    monkeypatch.setattr(client.Registry, "resolve", lambda *_: None)
    code = main(["release", "cells", "--matrix", str(path), "--registry", "127.0.0.1:1", "--json"])
    out, err = capsys.readouterr()
    assert code == (0 if source == "example" else 7), err
    assert all(not row["error"] or "is not a directory" in row["error"] for row in json.loads(out))


def test_the_matrix_of_the_examples_has_cells() -> None:
    _, cells = read_matrix(EXAMPLES / "release.toml")
    assert [cell.name for cell in cells if cell.gpus == ("h200",)] == [
        "llama-3.1-8b-tp1-h200", "llama-3.1-8b-tp2-h200", "qwen3-8b-tp1-h200", "qwen3-8b-tp2-h200",
    ]  # fmt: skip


def test_kubernetes_runs_each_cell_of_one_gpu_once_and_again_when_it_is_preempted() -> None:
    cells = job("cells.yaml")
    spec, pod = cells["spec"], cells["spec"]["template"]["spec"]
    assert cells["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] and spec["suspend"] is True
    assert spec["completionMode"] == "Indexed" and spec["backoffLimitPerIndex"] >= 1
    assert spec["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget"}],
    }
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-H200"
    (container,) = pod["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["COUNT"])
    _, listed = read_matrix(EXAMPLES / "release.toml")
    fitting = [cell for cell in listed if cell.gpu == given["GPU"] and cell.tp == int(given["COUNT"])]
    assert spec["completions"] == len(fitting)


@pytest.mark.parametrize("name", ["cells.yaml", "finish.yaml"])
def test_kubernetes_secrets_are_those_that_the_page_creates_and_are_mounted_where_they_are_read(name: str) -> None:
    pod = job(name)["spec"]["template"]["spec"]
    head = (EXAMPLES / "kubernetes" / "cells.yaml").read_text()
    made = set(re.findall(r"create (?:configmap|secret docker-registry|secret generic) (\w+)", head))
    assert {one["name"] for one in pod["volumes"]} - {"engine", "store"} == made
    (container,) = pod["containers"]
    places = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(places) == {one["name"] for one in pod["volumes"]}
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["DOCKER_CONFIG"] == places["registry"]
    (registry,) = [one for one in pod["volumes"] if one["name"] == "registry"]
    if name == "finish.yaml":
        words = container["command"][3:]
        assert parser_for(words).parse_args(words).sign == f"{places['cosign']}/cosign.key"
    assert registry["secret"]["items"] == [{"key": ".dockerconfigjson", "path": "config.json"}]


def test_github_makes_its_jobs_of_the_cells_that_are_missing() -> None:
    jobs = yaml.safe_load((EXAMPLES / "github" / "release-cells.yml").read_text())["jobs"]
    cell, finish = jobs["cell"], jobs["finish"]
    assert cell["strategy"] == {
        "fail-fast": False, "matrix": {"cell": "${{ fromJSON(needs.cells.outputs.missing) }}"},
    }  # fmt: skip
    assert "!= '[]'" in cell["if"], "an empty matrix is an error"
    assert finish["needs"] == ["cells", "cell"] and "!cancelled()" in finish["if"], "also when a cell failed"


@pytest.mark.parametrize(
    ("given", "code", "words", "requeued"),
    [
        ({"SLURM_JOB_GPUS": "0,2"}, 0, ["--gpus", "0,2", "--require-idle"], False),
        ({}, 8, [], True),
        ({"SLURM_RESTART_COUNT": "2"}, 8, [], True),
        ({"SLURM_RESTART_COUNT": "3"}, 8, [], False),
        ({}, 6, [], False),
    ],
)
def test_a_cell_of_slurm_uses_the_gpus_of_its_job_and_comes_back_when_the_registry_was_away(
    given: dict[str, str], code: int, words: list[str], requeued: bool, tmp_path: Path
) -> None:
    """Without Slurm: what it starts and asks for. (No GPU was used; which CPU cells do is tested with a real Slurm.)"""
    log, python, scontrol = tmp_path / "log", tmp_path / ".venv/bin/python", tmp_path / "bin/scontrol"
    for program, ends in ((python, code), (scontrol, 0)):
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" END >> {log}\nexit {ends}\n')
        program.chmod(0o755)
    (tmp_path / "words").write_text("--matrix\nrelease.toml\n")
    (tmp_path / "cells").write_text("a\nb c\n")
    env = {"WORK": str(tmp_path), "CELLS": "cells", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "7", **given}
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm" / "cell.sbatch"], cwd=tmp_path, check=False, capture_output=True, text=True,
        env={**env, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    started = ["-m", "pipeline", "release", "run", "--matrix", "release.toml", *words, "--cell", "b c", "END"]
    assert log.read_text().splitlines() == [*started, *(["requeue", "7_2", "END"] if requeued else [])]
    assert parser_for(started[2:-1]).parse_args(started[2:-1]).gpus == given.get("SLURM_JOB_GPUS", "")
