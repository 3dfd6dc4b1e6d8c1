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

pytestmark = pytest.mark.flashinfer


def said(tuner: Tuner, *words: str) -> Any:
    """The JSON on the last line that Python prints, in an interpreter that has FlashInfer and the scripts beside this."""
    environment = {**tuner.environment(), **ARCH}
    environment["PYTHONPATH"] = f"{HERE}:{environment['PYTHONPATH']}"
    done = subprocess.run([tuner.python, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(tuner: Tuner) -> Any:
    return said(tuner, str(HERE / "signatures.py"))


@pytest.fixture(scope="module")
def adapters(told: Any) -> Any:
    return {name: one for name, one in told.items() if len(name) == 1}


def test_every_adapter_calls_with_what_flashinfer_takes(adapters: Any) -> None:
    assert {one["op"] for one in adapters.values()} == {
        "mm_bf16", "bmm_fp8", "mm_fp4", "mm_mxfp8", "cutlass_fused_moe", "trtllm_fp8_block_scale_moe",
        "trtllm_fp4_block_scale_moe", "trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe",
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


def test_mxfp4_layers_of_hopper_are_called_as_servers_call_them(adapters: Any) -> None:
    """vLLM 0.33, fused_moe/experts/flashinfer_cutlass_moe.py and oracle/mxfp4.py: biases are part of the key."""
    one = adapters["l"]
    assert one["shapes"] == {
        "input": [8, 256], "token_selected_experts": [8, 2], "token_final_scales": [8, 2], "output": [8, 256],
        "fc1_expert_weights": [4, 256, 128], "fc2_expert_weights": [4, 256, 64],
        "fc1_expert_biases": [4, 256], "fc2_expert_biases": [4, 256],
        "swiglu_alpha": [4], "swiglu_beta": [4], "swiglu_limit": [4],
    }  # fmt: skip
    assert "use_w4_group_scaling" in one["arguments"]
    for name in "lm":  # m: of two ranks that divide the experts the second, which does not add the last bias
        assert 0.0 < adapters[name]["as called"] <= 1.0, (name, adapters[name])
        assert adapters[name]["mixed up"] > 1.0, (name, adapters[name])


def test_references_accept_what_is_right_and_nothing_else(adapters: Any) -> None:
    for name, one in adapters.items():
        assert one["right"] <= 1.0, (name, one)
        assert one["wrong"] > 1.0, (name, one)
        assert one["unwritten"] == float("inf"), (name, one)


def test_layers_without_block_scales_tell_tokens_and_experts_apart(adapters: Any) -> None:
    for name in "jk":
        assert adapters[name]["mixed up"] > 1.0, (name, adapters[name])


def test_layers_without_block_scales_are_called_with_what_their_reference_computes(adapters: Any) -> None:
    for name in "jk":
        assert 0.0 < adapters[name]["as called"] <= 1.0, (name, adapters[name])


@pytest.fixture(scope="module")
def keys(tuner: Tuner) -> Any:
    return said(tuner, str(HERE / "moe_keys.py"))


TRTLLM = (
    "trtllm_bf16_moe", "trtllm_fp8_per_tensor_scale_moe", "trtllm_fp8_block_scale_moe", "trtllm_fp4_block_scale_moe",
)  # fmt: skip


def test_trtllm_moe_is_tuned_by_bucket_under_the_name_that_the_adapter_says(keys: Any) -> None:
    for op in TRTLLM:
        one = keys[op]
        assert set(one["names"]) == {f"flashinfer::{op}"}
        assert (one["runner"], one["keys"]) == ("MoERunner", 12)
        assert one["answers"] == [1, 4, 512, 768, 1024]  # at 1, 3, 300, 700 and 1000 tokens
        assert one["tactics"] == {"MoERunner": [[8, 0]]}


def test_the_kernels_are_asked_for_the_layout_that_servers_have(keys: Any) -> None:
    # …, use_shuffled_weight, weight_layout, use_per_token_scaling, tokens, with a LoRA delta
    assert keys["trtllm_bf16_moe"]["asked"][-5:] == [1, 2, 0, 8, 0]
    assert keys["trtllm_fp8_per_tensor_scale_moe"]["asked"][-5:] == [1, 0, 0, 8, 0]


def test_what_the_keys_of_trtllm_moe_leave_out_is_refused(keys: Any) -> None:
    """Two layers are told apart by their keys, or refused in one cache; in this FlashInfer, whichever it is."""
    for op in TRTLLM:
        one = keys[op]
        assert sorted(one["told apart"] + one["clashes"]) == ["hidden", "intermediate", "local_experts", "top_k"], op
        assert "hidden" in one["told apart"]
    other, name = keys["routed"]
    assert other is True  # chosen experts in place of logits: the same name, another key
    assert name == "flashinfer::trtllm_bf16_moe"


def test_the_columns_that_a_server_takes_are_in_the_key(keys: Any) -> None:
    assert keys["narrow"] == [[8, 192], True]


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


def test_mxfp4_and_bf16_layers_do_not_share_keys(keys: Any) -> None:
    assert [one["of bf16"] for one in keys["cutlass"]] == [False, False]
    assert keys["beside bf16"] == []


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


def test_mxfp4_layers_of_other_kinds_are_refused(tuner: Tuner) -> None:
    script = (
        "import json, torch\n"
        "from dataclasses import replace\n"
        "from signatures import MXFP4, PLANS\n"
        "from pipeline.tune.ops import cuda, spec_of\n"
        "op = next(plan for plan in PLANS if plan.name == 'l')\n"
        "odd = [replace(op, shape={**op.shape, 'hidden': 192}), replace(op, dtypes={**op.dtypes, 'a': 'float16'}),\n"
        "       replace(op, options={'format': 'mxfp4'}), replace(op, options={**MXFP4, 'format': 'fp8_block'}), op]\n"
        "told = []\n"
        "for here, plan in zip((90, 90, 90, 90, 100), odd):\n"
        "    cuda.capability = lambda _: here\n"
        "    try:\n"
        "        spec_of(plan).make(plan, torch.device('cpu'), 3)\n"
        "    except cuda.OpNotHere as error:\n"
        "        told.append(error.message)\n"
        "print(json.dumps(told))\n"
    )
    sizes, dtype, kind, blocks, gpu = said(tuner, "-c", script)
    assert "multiples of 128, these are 192 and 128" in sizes
    assert "take bfloat16 activations" in dtype
    assert "as gpt-oss has them" in kind
    assert "profiling block scales measures nothing" in blocks
    assert "runs on compute capability 9.0, this GPU has 10.0" in gpu


def test_layers_whose_keys_collide_are_told(tuner: Tuner) -> None:
    script = (
        "from signatures import MOE, PLANS\n"
        "from pipeline.flashinfer.moe_keys import key_problems\n"
        "import json\n"
        "two = [p for p in PLANS if p.op == 'cutlass_fused_moe' and 'format' not in p.options]\n"
        "from dataclasses import replace\n"
        "whole = [replace(p, shape={**p.shape, 'tp': 1, 'ep': 1}) for p in two]\n"
        "told = [key_problems(whole, '0.6.16.post3'), key_problems(whole, '0.6.18'), key_problems(whole[:1], '0.6.16.post3')]\n"
        "told += [key_problems(two[:1], version) for version in ('0.6.17', '0.6.18', '0.7.1', '0.7.2.post1')]\n"
        "print(json.dumps(told))\n"
    )
    old, new, alone, *split = said(tuner, "-c", script)
    assert len(old) == 1
    assert "overwrite each other" in old[0]
    assert (new, alone) == ([], [])
    assert [len(lines) for lines in split] == [0, 1, 1, 0]
    assert "writes the rank into the keys" in split[1][0]


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
    others, written, asked, none = said(tuner, "-c", script)
    assert others == written == asked
    assert none == []


def test_a_gpu_plan_is_refused_where_there_is_no_gpu(tuner: Tuner, make_plan: Any, tmp_path: Path) -> None:
    from tune_harness import write_plan

    plan = replace(make_plan(), device="cuda", arch="90a")
    done = tuner.run("pipeline.tune", write_plan(plan, tmp_path / "plan.json"), tmp_path / "out")
    assert done.status == 2
    assert "GPUs visible" in done.stderr
