"""The GPU adapters without a GPU: their calls fit FlashInfer's signatures, their references tell right from wrong."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner

HERE = Path(__file__).parent
ARCH = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}  # without a GPU FlashInfer must be told one

pytestmark = [pytest.mark.flashinfer, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def told(tuner: Tuner) -> Any:
    done = subprocess.run(
        [tuner.python, str(HERE / "signatures.py")],
        env={**tuner.environment(), **ARCH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def adapters(told: Any) -> Any:
    return {name: one for name, one in told.items() if len(name) == 1}


def test_every_adapter_calls_with_what_flashinfer_takes(adapters: Any) -> None:
    assert {one["op"] for one in adapters.values()} == {
        "mm_bf16", "bmm_fp8", "mm_fp4", "mm_mxfp8", "cutlass_fused_moe", "trtllm_fp8_block_scale_moe",
        "trtllm_fp4_block_scale_moe",
    }  # fmt: skip
    assert {"local_expert_offset", "tune_max_num_tokens", "routing_method_type"} <= set(adapters["g"]["arguments"])


def test_calls_have_the_shapes_that_servers_give_them(adapters: Any) -> None:
    """Shapes are part of a key: vLLM 0.33, layers/quantization/modelopt.py and fused_moe/experts/trtllm_fp8_moe.py."""
    assert adapters["b"]["shapes"]["A_scale"] == adapters["b"]["shapes"]["B_scale"] == []
    assert adapters["c"]["shapes"]["alpha"] == []
    # shuffled, columns in blocks of 128 first: WeightLayout.BlockMajorK
    assert adapters["g"]["shapes"]["gemm1_weights"] == [4, 2, 256, 128]
    assert adapters["g"]["shapes"]["gemm2_weights"] == [4, 1, 256, 128]
    assert adapters["g"]["layout"] == [True, 2]


def test_references_accept_what_is_right_and_nothing_else(adapters: Any) -> None:
    for name, one in adapters.items():
        assert one["right"] <= 1.0, (name, one)
        assert one["wrong"] > 1.0, (name, one)
        assert one["unwritten"] == float("inf"), (name, one)


def test_modules_of_a_plan_are_known_before_it_is_tuned(told: Any) -> None:
    assert told["modules"] == ["gemm", "mm_bf16_cublaslt"]


def test_a_module_that_does_not_compile_is_told_on_every_rank(told: Any) -> None:
    message, *details, building = told["failed build"]
    assert message == "rank 1 could not compile FlashInfer's modules: RuntimeError: Ninja build failed."
    assert "nvcc: not found" in details
    assert building == "building 1 JIT modules"


def test_a_gpu_is_shared_only_when_asked_for(told: Any) -> None:
    refused, taken, note = told["devices"]
    assert refused == "2 ranks on this host, 1 GPUs visible"
    assert taken == "cuda:0"
    assert "2 ranks shared 1 GPU" in note


def test_layers_whose_keys_collide_are_told(tuner: Tuner) -> None:
    script = (
        "from signatures import MOE, PLANS\n"
        "from pipeline.tune.ops.cutlass_fused_moe import clashes\n"
        "import json\n"
        "two = [p for p in PLANS if p.op == 'cutlass_fused_moe']\n"
        "print(json.dumps([clashes(two, '0.6.16.post3'), clashes(two, '0.6.18'), clashes(two[:1], '0.6.16.post3')]))\n"
    )
    environment = {**tuner.environment(), **ARCH}
    environment["PYTHONPATH"] = f"{HERE}:{environment['PYTHONPATH']}"
    done = subprocess.run([tuner.python, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    old, new, alone = json.loads(done.stdout.splitlines()[-1])
    assert len(old) == 1
    assert "overwrite each other" in old[0]
    assert (new, alone) == ([], [])


def test_the_other_keys_of_fp8_products_are_those_that_flashinfer_writes(tuner: Tuner) -> None:
    script = (
        "import json\n"
        "import torch\n"
        "from flashinfer.autotuner import AutoTuner\n"
        "from flashinfer.gemm import gemm_base\n"
        "from pipeline.cache.otherkeys import other_keys, other_shapes\n"
        "config = gemm_base._FP8_GEMM_SM100_TUNING_CONFIG\n"
        "extras = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)\n"
        "def shapes(scale):\n"
        "    return ((1, 7, 64), (1, 64, 32), scale, scale, (1, 7, 32), (32 << 20,))\n"
        "def key(shapes):\n"
        "    return AutoTuner._get_cache_key('fp8_gemm', object(), shapes, config, extras).file_key\n"
        "others = other_keys(key(shapes(())))\n"
        "asked = key(other_shapes(shapes(())))\n"
        "print(json.dumps([others, [key(shapes((1,)))], [asked], other_keys(asked)]))\n"
    )
    done = subprocess.run(
        [tuner.python, "-c", script],
        env={**tuner.environment(), **ARCH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    others, written, asked, none = json.loads(done.stdout.splitlines()[-1])
    assert others == written == asked
    assert none == []


def test_a_gpu_plan_is_refused_where_there_is_no_gpu(tuner: Tuner, make_plan: Any, tmp_path: Path) -> None:
    from tune_harness import write_plan

    plan = replace(make_plan(), device="cuda", arch="90a")
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out")
    assert done.status == 2
    assert "GPUs visible" in done.stderr
