"""Two nodes that tune together: each supervises its own ranks, they meet where they were told to, the first saves.

Both nodes are this machine, with nothing in common but the endpoint: other working folders, other OUT.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, error_line, read_manifest, write_plan

from pipeline.cache.store import check_root
from pipeline.tune.ports import free_port

pytestmark = [pytest.mark.flashinfer, pytest.mark.once]


def test_two_nodes_of_one_rank_each_tune_one_plan(tuner: Tuner, make_plan: Any, tmp_path: Path) -> None:
    path = write_plan(make_plan(), tmp_path / "plan.json")
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = []
    for rank in (0, 1):
        words = [tuner.python, "-m", "pipeline.tune", str(path), str(tmp_path / f"out{rank}"), "--compare", "off"]
        words += ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", endpoint]
        nodes.append(
            subprocess.Popen(
                words, env={**tuner.environment(), "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        said = [node.communicate(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said[0][1] + said[1][1]
    assert "the first node saves the cache" in said[1][1]
    tree, findings = check_root(tmp_path / "out0")
    assert [str(finding) for finding in findings] == []
    assert len(tree.keys) == 1
    assert not list((tmp_path / "out1").rglob("*.json"))
    manifest = read_manifest(tmp_path / "out0")
    assert [one.rank for one in manifest.ranks] == [0, 1]
    assert [one.entries for one in manifest.ranks] == [5, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nnodes", "2"), "names no place"),
        (("--nnodes", "2", "--rdzv-endpoint", "host"), "names no place"),
        (("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1"), "--node-rank 2 of --nnodes 2"),
        (("--nnodes", "0"), "--nnodes 0"),
        (("--nnodes", "3", "--rdzv-endpoint", "h:1"), "2 ranks cannot be shared out over 3 nodes"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(
    words: tuple[str, ...], said: str, tuner: Tuner, make_plan: Any, tmp_path: Path
) -> None:
    done = tuner.run("pipeline.tune", write_plan(make_plan(), tmp_path / "plan.json"), tmp_path / "out", *words)
    assert done.status == 2, done.stderr
    assert said in error_line(done)
