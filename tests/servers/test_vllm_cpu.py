"""vLLM for CPUs, TP=1: warmed up, baked, proven by two starts; then what a user sees of the image.

The proof starts are fresh containers with a command of their own: as another user with a read-only root, and as root.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from real_vllm import ARGS, IMAGE, OWN, Pipeline

from pipeline.servers import kinds, manifest
from pipeline.servers.containers import manifest_in
from pipeline.servers.producer import PROOFS

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
    told = f"-v /your/model:/mnt/models:ro {IMAGE} --model /mnt/models --max-model-len 512 --max-num-seqs 8"
    assert told in built["said"]
    for proof in PROOFS:
        assert f"start vllm in the finished image {proof}" in built["said"]
    for kind in ("inductor", "model-info"):
        assert built["said"].count(f"{kind}: hit") == len(PROOFS)


def test_the_same_again_starts_no_server(built: dict[str, Any], pipeline: Pipeline) -> None:
    done = pipeline("build", "tiny", "--server", "vllm", "--server-args", ARGS, "--image", IMAGE, "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["reused"] is True
    assert again["image_id"] == built["image_id"]
    assert "start vllm" not in done.stderr


def test_explain_names_a_miss(built: dict[str, Any], pipeline: Pipeline) -> None:
    done = pipeline("explain", IMAGE, "--", *shlex.split(ARGS.replace("seqs 8", "seqs 16")))
    assert done.returncode == 7, done.stderr
    assert "max_num_seqs 16, baked with 8" in done.stdout
    done = pipeline("explain", IMAGE, "--", *shlex.split(ARGS))
    assert done.returncode == 0, done.stdout


LOOK = """
import os
places = [(top, 7) for top, _, _ in os.walk('/opt/warm')]
places += [(os.path.join(top, name), 6) for top, _, names in os.walk('/opt/warm') for name in names]
wrong = [place for place, mode in places if not os.access(place, mode)]
print(os.environ['VLLM_CACHE_ROOT'], os.environ['TORCHINDUCTOR_CACHE_DIR'], wrong)
"""


@pytest.mark.parametrize(
    ("user", "options", "caches"),
    [
        ("54321:0", {}, "/opt/warm"),  # as OpenShift runs it
        ("54321:54321", {}, "/opt/warm"),
        ("54321:54321", {"read_only": True, "volumes": ["/opt/warm"]}, "/opt/warm"),
        ("0:0", {"environment": {"PIPELINE_SERVER_CACHES": "/tmp/cold"}}, "/tmp/cold"),
    ],
)
@pytest.mark.usefixtures("built")
def test_any_user_may_write_beside_the_caches_or_leave_them_out(
    client: Any, user: str, options: dict[str, Any], caches: str
) -> None:
    words = ["python3", "-c", LOOK]
    said = client.containers.run(IMAGE, words, entrypoint=[], user=user, network_mode="none", remove=True, **options)
    assert said.decode().strip() == f"{caches}/vllm {caches}/inductor []"


def test_caches_of_a_host_with_another_device_are_baked_unverified(
    built: dict[str, Any], pipeline: Pipeline, client: Any, home: Path, tmp_path: Path
) -> None:
    """A folder as `warm-up --in-place` writes it: the one of the first test, as if an H200 had made it."""
    folder = tmp_path / "in-place"
    shutil.copytree(home / "warm-ups" / built["inputs"], folder)
    told, entry = folder / "root" / manifest.FILE.lstrip("/"), folder / "warmup.json"
    value = json.loads(entry.read_text())
    entry.write_text(json.dumps({**value, "inputs": value["inputs"]["inputs"]}))
    told.write_text(json.dumps({**json.loads(told.read_text()), "device": "NVIDIA H200"}))
    words = ("build", "tiny", "--server", "vllm", "--cache", str(folder), "--image", f"{OWN}/h200:1", "--json")
    done = pipeline(*words, "--server-args", ARGS)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["image"] == f"{OWN}/h200:1-unverified"
    assert outcome["verdict"]["level"] == "static"
    assert "start vllm" not in done.stderr
    client.images.remove(outcome["image"], force=True)
    done = pipeline(*words, "--server-args", "--model /mnt/models --max-model-len 64")
    assert done.returncode == 7
    assert "made with another value of arguments" in done.stderr


def test_the_manifest_and_the_entrypoint_are_in_the_image(built: dict[str, Any], client: Any) -> None:
    told, _ = manifest_in(client, IMAGE)
    assert told.sets[0].arguments[:2] == ("--model", "/mnt/models")
    assert "VLLM_CPU_OMP_THREADS_BIND" in told.hashed
    assert client.images.get(IMAGE).attrs["Config"]["Entrypoint"] == ["vllm", "serve"]
    assert manifest.FILE.startswith("/opt/pipeline/")
