"""The GPU adapters without a GPU: their calls fit FlashInfer's signatures, their references tell right from wrong."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_harness import Tuner, write_plan

HERE = Path(__file__).parent
ARCH = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}  # without a GPU FlashInfer needs one from here
TRTLLM = (
    "trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe", "trtllm_fp8_block_scale_moe", "trtllm_fp4_block_scale_moe",
)  # fmt: skip

pytestmark = pytest.mark.flashinfer


def said(tuner: Tuner, script: str) -> Any:
    """The JSON on the last line that a script beside this prints, in an interpreter that has FlashInfer."""
    environment = {**tuner.environment(), **ARCH}
    environment["PYTHONPATH"] = f"{HERE}:{environment['PYTHONPATH']}"
    words = [tuner.python, str(HERE / script)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tuner: Tuner) -> Any:
    return said(tuner, "signatures.py")


@pytest.fixture(scope="module")
def adapters(told: Any) -> Any:
    return {name: one for name, one in told.items() if len(name) == 1}


@pytest.fixture(scope="module")
def keys(tuner: Tuner) -> Any:
    return said(tuner, "moe_keys.py")


def test_every_adapter_calls_with_what_flashinfer_takes(adapters: Any) -> None:
    assert {one["op"] for one in adapters.values()} == {
        "mm_bf16", "bmm_fp8", "mm_fp4", "mm_mxfp8", "cutlass_fused_moe", *TRTLLM,
    }  # fmt: skip
    assert {"local_expert_offset", "tune_max_num_tokens", "routing_method_type"} <= set(adapters["g"]["arguments"])


def test_the_private_names_that_ops_need_are_there(told: Any) -> None:
    assert [name for name in told["needed"] if " has no " in name] == []
    assert {"gen_gemm_module", "gen_mm_bf16_cublaslt_module", "fp8_gemm_sm100"} <= set(told["needed"])


def test_calls_have_the_shapes_that_servers_give_them(adapters: Any) -> None:
    """Shapes are part of a key: vLLM 0.33, layers/quantization/modelopt.py and fused_moe/experts/trtllm_fp8_moe.py."""
    assert adapters["b"]["shapes"]["A_scale"] == adapters["b"]["shapes"]["B_scale"] == []
    assert adapters["c"]["shapes"]["alpha"] == []
    # shuffled, columns in blocks of 128 first: WeightLayout.BlockMajorK
    assert adapters["g"]["shapes"]["gemm1_weights"] == [4, 2, 256, 128]
    assert adapters["g"]["shapes"]["gemm2_weights"] == [4, 1, 256, 128]
    assert adapters["g"]["layout"] == [True, 2]
    # vllm, fused_moe/experts/trtllm_mxfp4_moe.py, hidden_dim_unpadded
    assert (adapters["i"]["shapes"]["hidden_states"], adapters["i"]["shapes"]["output"]) == ([8, 256], [8, 192])
    assert adapters["h"]["shapes"]["output"] == [8, 256]
    # vllm, fused_moe/oracle/unquantized.py; sglang, quantization/unquant.py: blocks of 128 bytes
    assert adapters["j"]["shapes"]["gemm1_weights"] == [4, 4, 256, 64]
    assert adapters["j"]["shapes"]["gemm2_weights"] == [4, 2, 256, 64]
    assert adapters["j"]["layout"] == [True, 2]
    # vllm, quantization/utils/flashinfer_utils.py; sglang, moe_runner/flashinfer_trtllm.py: one scale per local expert
    assert adapters["k"]["shapes"]["gemm1_weights"] == [8, 256, 256]
    assert adapters["k"]["shapes"]["gemm2_weights"] == [8, 256, 128]
    scales = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
    assert [adapters["k"]["shapes"][name] for name in scales] == [[8]] * 3
    assert (adapters["j"]["logits"], adapters["k"]["logits"]) == ("torch.bfloat16", "torch.float32")
    # vLLM 0.33, fused_moe/experts/flashinfer_cutlass_moe.py and oracle/mxfp4.py: biases are part of the key
    assert adapters["l"]["shapes"] == {
        "input": [8, 256], "token_selected_experts": [8, 2], "token_final_scales": [8, 2], "output": [8, 256],
        "fc1_expert_weights": [4, 256, 128], "fc2_expert_weights": [4, 256, 64],
        "fc1_expert_biases": [4, 256], "fc2_expert_biases": [4, 256],
        "swiglu_alpha": [4], "swiglu_beta": [4], "swiglu_limit": [4],
    }  # fmt: skip


def test_references_accept_what_is_right_and_nothing_else(adapters: Any) -> None:
    for name, one in adapters.items():
        assert one["right"] <= 1.0, (name, one)
        assert one["wrong"] > 1.0, (name, one)
        assert one["unwritten"] == float("inf"), (name, one)
    for name in "jklm":  # a model of the kernel computes with what the call was given; m: the second of two ranks
        assert 0.0 < adapters[name]["as called"] <= 1.0, (name, adapters[name])
        assert adapters[name]["mixed up"] > 1.0, (name, adapters[name])


def test_what_cannot_run_here_is_refused(told: Any) -> None:
    sizes, dtype, kind, blocks, gpu, backend = told["refused"]
    assert "multiples of 128, these are 192 and 128" in sizes
    assert "take bfloat16 activations" in dtype
    assert "as gpt-oss has them" in kind
    assert "profiling block scales measures nothing" in blocks
    assert "runs on compute capability 9.0, this GPU has 10.0" in gpu
    assert "mm_bf16 has no backend 'cutlas'" in backend


def test_trtllm_moe_is_tuned_by_bucket_in_the_layout_of_servers(keys: Any) -> None:
    for op in TRTLLM:
        one = keys[op]
        assert set(one["names"]) == {f"flashinfer::{op}"}
        assert (one["runner"], one["keys"]) == ("MoERunner", 12)
        assert one["answers"] == [1, 4, 512, 768, 1024]  # at 1, 3, 300, 700 and 1000 tokens
        assert one["tactics"] == {"MoERunner": [[8, 0]]}
    # …, use_shuffled_weight, weight_layout, use_per_token_scaling, tokens, with a LoRA delta
    assert keys["trtllm_bf16_moe"]["asked"][-5:] == [1, 2, 0, 8, 0]
    assert keys["trtllm_fp8_per_tensor_scale_moe"]["asked"][-5:] == [1, 0, 0, 8, 0]
    # chosen experts in place of logits: the same name, another key
    assert keys["routed"] == [True, "flashinfer::trtllm_bf16_moe"]
    assert keys["narrow"] == [[8, 192], True]


def test_what_the_keys_of_trtllm_moe_leave_out_is_refused(keys: Any) -> None:
    """Two layers differ by their keys, or refused in one cache; in this FlashInfer, whichever it is."""
    for op in TRTLLM:
        one = keys[op]
        assert sorted(one["told apart"] + one["clashes"]) == ["hidden", "intermediate", "local_experts", "top_k"], op
        assert "hidden" in one["told apart"]


def test_mxfp4_layers_of_hopper_have_the_keys_that_servers_ask_for(keys: Any) -> None:
    """Both questions of `cutlass_fused_moe`, in this FlashInfer: told apart or refused in one cache."""
    assert keys["offered"] == {"MoERunner": [0, 1]}
    for one, tactics in zip(keys["cutlass"], ([0, 1], [2, 3, 4]), strict=True):
        assert len(set(one["names"])) == 1
        assert one["inputs"] == [[8, 256], [8, 256, 128], [8, 256], [8, 256, 64], [8, 256]]  # the biases among them
        assert one["tactics"] == tactics
        assert one["answers"] == [1, 4, 512, 768, 1024]  # at 1, 3, 300, 700 and 1000 tokens
        assert sorted(one["told apart"] + one["clashes"]) == [
            "hidden", "intermediate", "local_experts", "top_k", "tp"
        ]  # fmt: skip
        assert {"hidden", "intermediate", "local_experts"} <= set(one["told apart"])
        assert one["ranks"] == 1  # in both versions; between them keys hold the rank (flashinfer/moe_keys.py)
        # the option that SGLang sets is in the key where top_k and the rest are
        assert one["as SGLang"] is ("top_k" in one["clashes"])
        assert one["of bf16"] is False
    assert keys["beside bf16"] == []


def test_the_other_keys_of_fp8_products_are_those_that_flashinfer_writes(told: Any) -> None:
    others, written, asked, none = told["other keys"]
    assert others == written == asked
    assert none == []


def test_modules_are_known_before_tuning_and_a_failed_build_is_reported_on_every_rank(told: Any) -> None:
    assert told["modules"] == ["gemm", "mm_bf16_cublaslt"]
    message, *details, building = told["failed build"]
    assert message == "rank 1 could not compile FlashInfer's modules: RuntimeError: Ninja build failed."
    assert "nvcc: not found" in details
    assert building == "building 1 JIT modules"


def test_a_gpu_is_shared_by_ranks_that_replay_alone(told: Any) -> None:
    assert told["devices"] == ["2 ranks on this host, 1 GPUs visible", "cuda:0"]


@pytest.mark.once
def test_a_gpu_plan_is_refused_where_there_is_no_gpu(tuner: Tuner, make_plan: Any, tmp_path: Path) -> None:
    plan = replace(make_plan(), device="cuda", arch="90a")
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out")
    assert done.status == 2
    assert "GPUs visible" in done.stderr
