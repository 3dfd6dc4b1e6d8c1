"""ENGINE=: a base with an engine in it, its own start in the tuned stage, its files baked, offered and found again.

No real engine runs here (they need a GPU): a stand-in writes the files as the real ones do, in a base image made for
the test. What that proves is our part of it: the start, its bounds, gathering, judging, baking, verifying, offering.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
MODEL = "/models/small one"
CONFIG = json.dumps({"architectures": ["StandInForCausalLM"], "model_type": "stand_in", "hidden_size": 64})


def archive(files: dict[str, tuple[str, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, (text, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), mode
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.fixture(scope="module", params=["0.28.0", "0.33.0"])
def base(request: pytest.FixtureRequest, client: Any, built: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A serving image with FlashInfer, vLLM of one version and SGLang, and an entry point of its own."""
    script = f"#!/opt/venv/bin/python\n{STAND_IN.read_text()}"
    python = client.containers.run(
        built["image_id"], ["python3", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], remove=True,
        network_mode="none", entrypoint=[],
    )  # fmt: skip
    site = python.decode().strip().lstrip("/")
    facts = {
        f"{site}/{name}-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            0o644,
        )
        for name, version in (("vllm", request.param), ("sglang", "0.5.23"))
    }
    container = client.containers.create(
        built["image_id"], ["rm", "-rf", "/opt/flashinfer_autotune_cache"], entrypoint=[], user="0:0"
    )
    tag = request.param.replace(".", "")
    try:
        container.start()
        container.wait()
        files = {"opt/venv/bin/vllm": (script, 0o755), f"{site}/sglang/launch_server.py": (script, 0o644), **facts}
        container.put_archive("/", archive(files))
        container.commit("tuned-test/serving", f"engine{tag}", changes=['ENTRYPOINT ["vllm", "serve"]', "USER 1234"])
    finally:
        container.remove(force=True)
    yield f"tuned-test/serving:engine{tag}", request.param
    client.images.remove(f"tuned-test/serving:engine{tag}", force=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(CONFIG)
    (place / "weights.safetensors").write_text("never read")
    return place


def image(pipeline: Any, base: str, model: Path, name: str, *words: str) -> Any:
    return pipeline("build", str(model), "--base-image", base, "--device", "cpu", "--image", name, "--json", *words)


def serve(client: Any, name: str, command: list[str], **options: Any) -> tuple[int, str, str]:
    """The finished image as somebody runs it: the model mounted at its path, any user, root read-only."""
    container = client.containers.create(
        name, command, network_mode="none", user="65532:65532", read_only=True, tmpfs={"/tmp": "mode=1777"},
        volumes=[MODEL], **options,
    )  # fmt: skip
    try:
        container.put_archive(MODEL, archive({"config.json": (CONFIG, 0o644)}))
        container.start()
        status = container.wait(timeout=300)["StatusCode"]
        said = [container.logs(stdout=out, stderr=not out).decode() for out in (True, False)]
        return status, said[0], said[1]
    finally:
        container.remove(force=True, v=True)


def manifest_of(client: Any, name: str, key: str) -> dict[str, Any]:
    container = client.containers.create(name, ["true"])
    try:
        chunks, _ = container.get_archive(f"/opt/flashinfer_autotune_cache/{key}/manifest.json")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            return json.loads(tar.extractfile(tar.getmembers()[0]).read())
    finally:
        container.remove(force=True)


def test_vllm_tunes_in_its_own_start_and_finds_it_at_the_next(
    base: tuple[str, str], model: Path, pipeline: Any, client: Any
) -> None:
    """0.28 on two ranks that share a file, 0.33 on one with FlashInfer's managed store."""
    where, version = base
    ranks = 2 if version == "0.28.0" else 1
    name = f"tuned-test/engine:vllm{version.replace('.', '')}-{ranks}"
    words = ["--max-model-len", "4096", "--tensor-parallel-size", str(ranks)]
    done = image(
        pipeline, where, model, name, "--engine", "vllm", "--engine-env", "VLLM_USE_DEEP_GEMM=0",
        "--engine-args", f"'{MODEL}' {' '.join(words)} --port 9 --load-format safetensors",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    try:
        outcome = done.json()
        assert outcome["verdict"]["level"] == "replay" and outcome["entries"] == 3 and outcome["ranks"] == ranks
        assert outcome["verdict"]["checks"]["replayed calls"] == outcome["verdict"]["checks"]["hits"] == 9
        manifest = manifest_of(client, name, outcome["key"])
        layout = manifest["options"]["layout"]
        assert (layout["version"], layout["variable"]) == (version, "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
        if version == "0.28.0":
            assert layout["variables"] == {"VLLM_USE_DEEP_GEMM": "0"}
        one = {"0.28.0": "autotune_configs.json", "0.33.0": "manifest.json"}[version]
        assert f"engine/{layout['directory']}/{one}" in manifest["files"]
        assert "weights.safetensors" not in json.dumps(manifest)

        run = [MODEL, *words]
        env = {"VLLM_USE_DEEP_GEMM": "0", "STAND_IN_ONCE": "1"}
        status, out, err = serve(client, name, run, environment=env)
        assert status == 0, err
        assert "3 entries, 0 tuned at this start, load format auto" in out
        assert err.startswith("tuned cache: 3 entries for ") and len(err.splitlines()) == 1
        status, out, err = serve(client, name, [MODEL, "--max-model-len", "9"], environment=env)
        assert "not used: it was tuned with other arguments (--max-model-len" in err
        if version == "0.28.0":
            status, out, err = serve(client, name, run, environment={**env, "VLLM_API_KEY": "secret"})
            assert "not used: the engine's own hash changes with VLLM_API_KEY" in err and "secret" not in err
            required = {**env, "VLLM_API_KEY": "secret", "PIPELINE_REQUIRE_TUNED": "1"}
            assert serve(client, name, run, environment=required)[:2] == (7, "")
        explained = pipeline("explain", name, "--live", "--json")
        assert explained.status == 0, explained.stderr
        assert f"vllm {version}" in explained.json()["keys"][0]["notes"][0]
        again = image(
            pipeline, where, model, name, "--engine", "vllm", "--engine-env", "VLLM_USE_DEEP_GEMM=0",
            "--engine-args", f"'{MODEL}' {' '.join(words)} --port 9 --load-format safetensors",
        ).json()  # fmt: skip
        assert again["reused"] is True and again["cache_diff_id"] == outcome["cache_diff_id"]
    finally:
        client.images.remove(name, force=True)


def test_sglang_tunes_in_its_own_start(base: tuple[str, str], model: Path, pipeline: Any, client: Any) -> None:
    where, version = base
    if version != "0.28.0":
        pytest.skip("once is enough: its version does not depend on vLLM's")
    name = "tuned-test/engine:sglang"
    words = f"--model-path '{MODEL}' --tp-size 2"
    done = image(pipeline, where, model, name, "--engine", "sglang", "--engine-args", words, "--tune-in", "container")
    assert done.status == 0, done.stderr
    try:
        outcome = done.json()
        assert outcome["verdict"]["level"] == "replay" and outcome["ranks"] == 2
        files = manifest_of(client, name, outcome["key"])["files"]
        assert sorted(file.rpartition("/")[2] for file in files if file.startswith("engine/flashinfer/autotune/")) == [
            "rank_tp0_pp0_dp0.json", "rank_tp1_pp0_dp0.json",
        ]  # fmt: skip
        command = ["python3", "-m", "sglang.launch_server", "--model-path", MODEL, "--tp-size", "2"]
        status, out, err = serve(
            client, name, command, entrypoint=["/opt/pipeline/bin/pipeline-run"], environment={"STAND_IN_ONCE": "1"}
        )
        assert (status, "3 entries, 0 tuned at this start" in out) == (0, True), err
    finally:
        client.images.remove(name, force=True)


def test_ranks_that_disagree_are_refused_and_no_image_is_made(
    base: tuple[str, str], model: Path, pipeline: Any, client: Any
) -> None:
    """The other ways to fail are tried outside containers, in tests/tune."""
    where, version = base
    if version != "0.33.0":
        pytest.skip("the older version has one file for all ranks")
    words = f"'{MODEL}' --tensor-parallel-size 2 --stand-in disagree"
    done = image(pipeline, where, model, "tuned-test/engine:no", "--engine", "vllm", "--engine-args", words)
    assert done.status == 7, done.stderr
    assert "autotune_configs_dp0_rank0.json and" in done.stderr and "stand_in_gemm" in done.stderr
    assert "nothing was baked" in done.stderr and "Traceback" not in done.stderr
    assert not [tag for one in client.images.list() for tag in one.tags if tag.startswith("tuned-test/engine:no")]
