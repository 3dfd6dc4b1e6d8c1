"""The CUDA image from wheels, as far as a machine without a GPU gets: its tuner image, and modules compiled in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.large]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(2700)
def test_the_cuda_image_builds_up_to_tuner_and_compiles(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pipeline.contract.plan import Layout, OpPlan, Plan
    from pipeline.image.buildx import Build, build
    from pipeline.image.containers import ContainerSpec, run_one
    from pipeline.image.request import Request
    from pipeline.image.resolve import resolve
    from pipeline.image.session import open_session
    from pipeline.image.tuner import TuneProducer
    from pipeline.versions import load

    versions = load(ROOT)
    bfloat16 = {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
    op = OpPlan("qkv", "mm_bf16", {"n": 6144, "k": 4096}, bfloat16, (1, 64), backends=("cublaslt",))
    small = Plan("small", "cuda", "90a", versions["FLASHINFER_VERSION"], Layout(tp=1), (op,))
    monkeypatch.setattr("pipeline.image.resolve._check_gpus", lambda *_: None)
    monkeypatch.setattr("pipeline.image.resolve._offer", lambda *_: __import__("pipeline.image.gpus").image.gpus.Gpus())
    with open_session("test") as session:
        inputs = resolve(Request(ROOT, "small", small, lambda _target, _version: small, device="cuda"), session)
        producer = inputs.producer
        assert isinstance(producer, TuneProducer)
        tuner, recipe = producer.build(), producer.recipe
        final = build(session, Build(recipe.dockerfile, "runtime", recipe.contexts, recipe.arguments)).image_id
        sizes = [session.client.images.get(one).attrs["Size"] for one in (tuner, final)]
        assert sizes[0] > sizes[1]

        def said(image: str, *command: str) -> str:
            return run_one(session.client, image, list(command), ContainerSpec(), timeout=60).stdout.strip()

        look = "import shutil; print(shutil.which('c++'), shutil.which('gcc'))"
        assert said(final, "python3", "-c", look) == "None None", "the finished image has a compiler"
        release = ".".join(versions["CUDA_VERSION"].split(".")[:2])
        assert f"release {release}" in said(tuner, "/usr/local/cuda/bin/nvcc", "--version")
        made = producer.compiled
        assert made is not None and made.names
        for name in made.names:
            (library,) = made.root.rglob(f"{name}.so")
            assert library.read_bytes()[:4] == b"\x7fELF"
