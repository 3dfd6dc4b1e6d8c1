"""The Slurm example, run as it is by a real Slurm: what is submitted for a matrix, and one tune on two nodes.

Whole cells need a Docker Engine: tests/docker/test_release.py runs those.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from release_registries import Running
from release_slurm import EXAMPLES, Slurm, cluster

ROOT = Path(__file__).resolve().parents[2]
MATRIX = """
[gpus.h200]
arch = "90a"

[[cells]]
model = "tiny"
tp = [1, 2]
gpu = "h200"

[[cells]]
model = "tiny"
device = "cpu"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm") / "run", os.environ) as one:
        yield one


def test_each_kind_of_gpu_is_an_array_and_finish_depends_on_all(slurm: Slurm, plain: Running, tmp_path: Path) -> None:
    (tmp_path / "release.toml").write_text(MATRIX)
    env = {"REGISTRY": f"{plain.host}/slurm", "SBATCH_PARTITION": "closed"}
    work, (cpu, one, two, last) = slurm.submit(tmp_path / "release.toml", env)
    assert [slurm.job(number)["TresPerNode"] for number in (one, two)] == ["gres:gpu:h200:1", "gres:gpu:h200:2"]
    assert "TresPerNode" not in slurm.job(cpu)
    assert {slurm.job(number)["Requeue"] for number in (cpu, one, two, last)} == {"1"}
    assert re.findall(r"afterany:(\d+)", slurm.job(last)["Dependency"]) == [cpu, one, two]
    assert (work / "h200-2.cells").read_text() == "tiny-tp2-h200\n"
    slurm.call("scancel", cpu, one, two, last)


def test_one_plan_is_tuned_on_two_nodes_and_pushed_or_nothing_is(slurm: Slurm, plain: Running, tmp_path: Path) -> None:
    python = os.environ.get("PIPELINE_TUNE_PYTHON", str(ROOT / ".venv-tune" / "bin" / "python"))
    if not Path(python).exists() and os.environ.get("CI") != "true":
        pytest.skip("no interpreter with torch and FlashInfer: set PIPELINE_TUNE_PYTHON")
    plan, oci = tmp_path / "plan.json", f"oci://{plain.host}/nodes:tiny"
    words = ["plan", "tiny", "--tp", "2", "--device", "cpu", "--ops", "o", "--buckets", "1,8", "-o", plan]
    subprocess.run([sys.executable, "-m", "pipeline", *map(str, words)], cwd=ROOT, check=True, timeout=300)
    env = {"PLAN": str(plan), "OCI": oci, "TUNER_PYTHON": python, "OMP_NUM_THREADS": "1"}
    job = ["sbatch", "--wait", f"--chdir={ROOT}", f"--output={tmp_path}/nodes.log", EXAMPLES / "nodes.sbatch"]
    before = plain.blobs()
    slurm.call(*job, env={**env, "PLAN": str(tmp_path / "absent.json")}, fails=True)
    assert plain.blobs() == before, "a node that fails ends the others, and nothing is pushed"
    slurm.call(*job, env=env)
    assert "2 ranks on cpu" in (tmp_path / "nodes.log").read_text()
    pulled = [sys.executable, "-m", "pipeline", "cache", "pull", oci, "-o", str(tmp_path / "pulled")]
    subprocess.run(pulled, cwd=ROOT, check=True, timeout=300)
    (manifest,) = (tmp_path / "pulled").rglob("manifest.json")
    assert len(json.loads(manifest.read_text())["ranks"]) == 2
