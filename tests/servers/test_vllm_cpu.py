"""vLLM for CPUs, TP=1: warmed up, baked, proven by two starts; then what a user sees of the image."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_vllm import IMAGE, Pipeline

from pipeline.servers import kinds, manifest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2700)]


def test_the_image_lives_from_its_caches(built: dict[str, Any]) -> None:
    assert built["verdict"]["result"] == "pass"
    assert built["verdict"]["level"] == "replay"
    assert built["verdict"]["checks"]["starts"] == 2
    found = {one["kind"] for one in built["caches"]}
    assert {"inductor", "model-info", "manifest"} <= found
    assert built["environment"]["TORCHINDUCTOR_CACHE_DIR"] == f"{kinds.ROOT}/inductor"
    assert built["said"].count(": hit") >= 4


def test_the_same_again_starts_no_server(built: dict[str, Any], pipeline: Pipeline) -> None:
    began = time.monotonic()
    done = pipeline("build", "tiny", "--server", "vllm", "--image", IMAGE, "--json")
    assert done.returncode == 0, done.stderr
    assert "start 1" not in done.stderr
    assert time.monotonic() - began < 60


def test_explain_names_a_miss(built: dict[str, Any], pipeline: Pipeline) -> None:
    words = ("--", "--model", "/mnt/models", "--max-model-len", "512", "--max-num-seqs", "16")
    done = pipeline("explain", IMAGE, *words)
    assert done.returncode == 7, done.stderr
    assert "max_num_seqs 16, baked with 8" in done.stdout


def test_the_manifest_and_the_entrypoint_are_in_the_image(built: dict[str, Any]) -> None:
    from pipeline.daemon import connect, find
    from pipeline.servers.producer import manifest_in

    engine = find()
    assert engine is not None
    client = connect(engine)
    told, _ = manifest_in(client, IMAGE)
    assert told.arguments[:2] == ("--model", "/mnt/models")
    assert "VLLM_CPU_OMP_THREADS_BIND" in told.hashed
    assert client.images.get(IMAGE).attrs["Config"]["Entrypoint"] == ["vllm", "serve"]
    assert manifest.FILE.startswith("/opt/pipeline/")
    client.close()
