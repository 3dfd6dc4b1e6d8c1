"""What the adapters say of SGLang, beside SGLang's own code: run from its published package, all else stubbed.

Downloads the wheel through pip (PIPELINE_SERVER_WHEELS keeps it in a folder) and takes only the Python files that are
looked at. No GPU, no torch: SGLang's own functions run over stand-ins for what they import.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.servers import adapters, kinds

pytestmark = pytest.mark.large
SPACE = types.SimpleNamespace


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ast.Module]:
    """A file of SGLang's package, parsed."""
    place = Path(os.environ.get("PIPELINE_SERVER_WHEELS") or tmp_path_factory.mktemp("wheels"))
    if not list(place.glob("sglang-0.5.23-*.whl")):
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(place)]
        words += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "sglang==0.5.23"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    wheel = zipfile.ZipFile(next(place.glob("sglang-0.5.23-*.whl")))
    return lambda name: ast.parse(wheel.read(f"sglang/srt/{name}").decode())


def functions(tree: ast.Module, names: set[str], given: dict[str, object]) -> dict[str, object]:
    wanted = [node for node in tree.body if getattr(node, "name", "") in names]
    assert len(wanted) == len(names)
    exec("from __future__ import annotations\nfrom typing import Dict\n" + "\n".join(map(ast.unparse, wanted)), given)
    return given


@pytest.mark.parametrize("draft", [False, True])
def test_its_autotune_file_is_found_among_its_caches(source, tmp_path, monkeypatch, draft) -> None:
    flashinfer = types.ModuleType("flashinfer")
    flashinfer.__dict__["__version__"] = "0.7.2"
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    model = SPACE(model_path="/models/x", quantization="fp8")
    execution = SPACE(
        moe=SPACE(moe_runner_backend="flashinfer_cutlass"), kernel=SPACE(flashinfer_autotune_skip_ops=["b", "a"])
    )
    parallel = SPACE(tp_size=4, pp_size=1, attn_dp_size=2, moe_ep_size=4, tp_rank=3, pp_rank=0, dp_rank=1)
    given = functions(
        source("model_executor/runner/flashinfer_autotune.py"),
        {"flashinfer_autotune_cache_path", "get_flashinfer_autotune_skip_ops"},
        {
            "Path": Path,
            "hashlib": hashlib,
            "torch": SPACE(cuda=SPACE(get_device_capability=lambda device: (9, 0))),
            "envs": SPACE(SGLANG_CACHE_DIR=SPACE(get=lambda: str(tmp_path / "sglang"))),
            "get_model": lambda: model,
            "get_exec": lambda: execution,
            "get_parallel": lambda: parallel,
            "FLASHINFER_AUTOTUNE_WORKAROUND_SKIPS": frozenset(),
        },
    )

    class LlamaConfig:
        pass

    config = SPACE(hf_config=LlamaConfig(), quantization="fp4")
    runner = SPACE(dtype="torch.bfloat16", model_config=config, is_draft_worker=draft, device="cuda:0", gpu_id=0)
    theirs = given["flashinfer_autotune_cache_path"](runner)
    assert theirs.parent.parent == tmp_path / "sglang" / "flashinfer" / "autotune" / "0.7.2" / "sm90"
    assert theirs.name == "rank_tp3_pp0_dp1.json"
    assert kinds.place_of(str(Path(kinds.ROOT, theirs.relative_to(tmp_path))))[0] == "flashinfer-autotune"


def test_our_variables_are_its_own_defaults_below_its_root(source) -> None:
    placed = adapters.Sglang().environment()
    given = functions(
        source("environ.py"),
        {"third_party_cache_defaults"},
        {"os": os, "envs": SPACE(SGLANG_CACHE_DIR=SPACE(get=lambda: placed["SGLANG_CACHE_DIR"]))},
    )
    theirs = given["third_party_cache_defaults"]()
    assert len(theirs) >= 5
    assert {name: placed.get(name) for name in theirs} == theirs
    for name, place in theirs.items():
        if name != "FLASHINFER_WORKSPACE_BASE":
            assert kinds.place_of(f"{place}/x")[0] != kinds.OTHER, name
