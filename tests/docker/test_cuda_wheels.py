"""The CUDA image from wheels, as far as a machine without a GPU gets: built up to `tuner`, and modules compiled in it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.large]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(2700)
def test_the_cuda_image_builds_up_to_tuner_and_compiles(engine: Any, client: Any, tmp_path: Path) -> None:
    from pipeline.contract.plan import Layout, OpPlan, Plan
    from pipeline.image import halves, libraries, modules
    from pipeline.image.buildkit import Stage
    from pipeline.image.contain import Sandbox, run_to_end
    from pipeline.image.gpus import NO_GPUS
    from pipeline.image.prepare import prepare
    from pipeline.image.request import Request
    from pipeline.versions import load

    versions = load(ROOT)
    bfloat16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
    op = OpPlan("qkv", "mm_bf16", {"n": 6144, "k": 4096}, bfloat16, (1, 64), backends=("cublaslt",))
    small = Plan("small", "cuda", "90a", versions["FLASHINFER_VERSION"], Layout(tp=1), (op,))
    seconds: dict[str, float] = {}

    def timed(name: str, began: float) -> None:
        seconds[name] = round(time.monotonic() - began, 1)
        print(name, seconds[name], "s", flush=True)

    began = time.monotonic()
    request = Request(root=ROOT, plan=lambda target, version: small, device="cuda", caches=(tmp_path,))
    prepared = prepare(request, engine, client, tmp_path / "log")
    timed("prepare", began)
    assert prepared.two_bases
    assert prepared.plan.device == "cuda"
    began = time.monotonic()
    tuner = prepared.builder.build(Stage("tuner", contexts=prepared.contexts, arguments=prepared.arguments))
    timed("build tuner", began)
    began = time.monotonic()
    final = prepared.builder.build(Stage("jit", contexts=prepared.contexts, arguments=prepared.arguments))
    timed("build jit", began)
    sizes = {name: client.images.get(one.image_id).attrs["Size"] for name, one in (("tuner", tuner), ("jit", final))}
    print("bytes", sizes, flush=True)
    assert sizes["tuner"] > sizes["jit"]

    libraries.check_same(client, tuner.image_id, final.image_id, NO_GPUS)
    asked = halves.read_half(client, final.image_id, max_wait=300)
    major = versions["CUDA_VERSION"].split(".", maxsplit=1)[0]
    assert f"libcublas.so.{major}" in asked.libraries
    assert asked.fields["cuda_version"] == ".".join(versions["CUDA_VERSION"].split(".")[:2])

    def said(image: str, *command: str) -> str:
        return run_to_end(client, image, list(command), Sandbox(), max_wait=60).stdout.strip()

    look = "import shutil; print(shutil.which('c++'), shutil.which('gcc'))"
    assert said(final.image_id, "python3", "-c", look) == "None None", "the finished image has a compiler"
    release = ".".join(versions["CUDA_VERSION"].split(".")[:2])
    assert f"release {release}" in said(tuner.image_id, "/usr/local/cuda/bin/nvcc", "--version")

    began = time.monotonic()
    made = modules.fill(client, tuner.image_id, prepared.plan, NO_GPUS, tmp_path / "modules", max_wait=1800)
    timed("compile", began)
    assert made.names
    for name in made.names:
        (library,) = made.root.rglob(f"{name}.so")
        assert library.read_bytes()[:4] == b"\x7fELF"
    print(json.dumps(json.loads((tmp_path / "modules" / "modules.json").read_text())), flush=True)
