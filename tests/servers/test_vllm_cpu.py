"""vLLM for CPUs, TP=1: warmed up, baked, proven by two starts; then what a user sees of the image.

The proof starts are fresh containers with a command of their own: as another user with a read-only root, and as root.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from real_vllm import IMAGE, Pipeline

from pipeline.servers import kinds, manifest
from pipeline.servers.producer import PROOFS, manifest_in

# The first test waits for the base, up to three starts and two proofs; a start takes minutes where much else runs.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(5400)]


def test_the_image_lives_from_its_caches(built: dict[str, Any]) -> None:
    assert built["reused"] is False
    assert built["verdict"]["result"] == "pass"
    assert built["verdict"]["level"] == "replay"
    assert built["verdict"]["checks"]["starts"] == len(PROOFS)
    found = {one["kind"] for one in built["caches"]}
    assert {"inductor", "model-info", "manifest"} <= found
    assert built["environment"]["TORCHINDUCTOR_CACHE_DIR"] == f"{kinds.ROOT}/inductor"
    told = "-v /your/model:/mnt/models:ro servers-test/tiny:1 --model /mnt/models --max-model-len 512 --max-num-seqs 8"
    assert told in built["said"]
    for proof in PROOFS:
        assert f"start vllm in the finished image {proof}" in built["said"]
    for kind in ("inductor", "model-info"):
        assert built["said"].count(f"{kind}: hit") == len(PROOFS)


def test_the_same_again_starts_no_server(built: dict[str, Any], pipeline: Pipeline) -> None:
    done = pipeline("build", "tiny", "--server", "vllm", "--image", IMAGE, "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["reused"] is True
    assert again["image_id"] == built["image_id"]
    assert "start vllm" not in done.stderr


def test_explain_names_a_miss(built: dict[str, Any], pipeline: Pipeline) -> None:
    words = ("--", "--model", "/mnt/models", "--max-model-len", "512", "--max-num-seqs")
    done = pipeline("explain", IMAGE, *words, "16")
    assert done.returncode == 7, done.stderr
    assert "max_num_seqs 16, baked with 8" in done.stdout
    done = pipeline("explain", IMAGE, *words, "8")
    assert done.returncode == 0, done.stdout


def test_the_manifest_and_the_entrypoint_are_in_the_image(built: dict[str, Any], client: Any) -> None:
    told, _ = manifest_in(client, IMAGE)
    assert told.arguments[:2] == ("--model", "/mnt/models")
    assert "VLLM_CPU_OMP_THREADS_BIND" in told.hashed
    assert client.images.get(IMAGE).attrs["Config"]["Entrypoint"] == ["vllm", "serve"]
    assert manifest.FILE.startswith("/opt/pipeline/")
