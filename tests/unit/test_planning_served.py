"""What vLLM 0.28 and 0.33 and SGLang 0.5.23 ask FlashInfer for: sizes, backends, and who finds an entry."""

import json
from dataclasses import replace

import pytest
from planning_samples import NEW, OLD, config_of, ops, plan_of, reasons

from pipeline.contract.plan import Plan
from pipeline.planning.find import find_model
from pipeline.planning.problems import PlanRefused
from pipeline.planning.show import describe


def quantized(tmp_path, base, **quantization):
    return config_of(tmp_path, base, quantization_config={"quant_method": "modelopt", **quantization})


def found_by(op):
    return next(note for note in op.notes if "vLLM (0.28, 0.33)" in note)


# --- sizes


@pytest.mark.parametrize(("tp", "inner"), [(1, 2944), (2, 1536), (4, 768), (8, 384)])
def test_mxfp4_experts_are_padded(tp, inner):
    # vllm-project/vllm, vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: 2880 // tp up to 128, hidden up to 256
    op = ops(plan_of("gpt-oss-120b", arch="100a", tp=tp))["experts"]
    assert (op.op, op.shape["hidden"], op.shape["intermediate"]) == ("trtllm_fp4_block_scale_moe", 3072, inner)
    assert any("2880 → 3072" in note for note in op.notes)
    # vllm, fused_moe/experts/trtllm_mxfp4_moe.py: the output has the columns of the model, and its shape is in the key
    assert op.options["hidden_out"] == "2880"
    # sgl-project/sglang, srt/layers/moe/moe_runner/flashinfer_trtllm.py
    assert "--flashinfer-mxfp4-moe-precision bf16" in found_by(op)


@pytest.mark.parametrize(("tp", "inner"), [(1, 2944), (2, 1536), (4, 768), (8, 384)])
@pytest.mark.parametrize("version", [OLD, "0.7.2.post1", NEW])
def test_mxfp4_experts_go_through_cutlass_on_hopper(tp, inner, version):
    # vllm, fused_moe/oracle/mxfp4.py: FLASHINFER_CUTLASS_MXFP4_BF16, both sizes up to 128
    op = ops(plan_of("gpt-oss-120b", arch="90a", tp=tp, version=version))["experts"]
    assert (op.op, op.shape["hidden"], op.shape["intermediate"]) == ("cutlass_fused_moe", 2944, inner)
    assert op.dtypes == {"a": "bfloat16", "b": "uint8", "out": "bfloat16"}
    assert op.options == {"activation": "swiglu_oai", "bias": "true", "format": "mxfp4"}
    assert any("unverified" in note for note in op.notes)
    assert "--moe-backend flashinfer_cutlass (its choice here is Triton)" in found_by(op)
    # sglang, srt/layers/moe/fused_moe_triton/layer.py and moe_runner/flashinfer_cutlass.py
    assert "--moe-runner-backend flashinfer_mxfp4 pads hidden sizes to 256" in found_by(op)
    assert "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1" in found_by(op)


def test_mxfp4_experts_are_left_out_on_hopper_where_keys_hold_the_rank():
    assert "the rank into the keys" in reasons(plan_of("gpt-oss-120b", tp=2, version="0.7.1"))["experts"]
    assert ops(plan_of("gpt-oss-120b", version="0.7.1"))["experts"].options["format"] == "mxfp4"
    dealt = ops(plan_of("gpt-oss-120b", tp=2, ep=2))["experts"]
    assert (dealt.shape["local_experts"], dealt.shape["intermediate"]) == (64, 2944)
    assert dealt.options["routing"] == "round_robin"


def test_mxfp4_experts_that_no_server_asks_so_are_left_out_on_hopper(tmp_path):
    mixtral = config_of(tmp_path, "Mixtral-8x7B", quantization_config={"quant_method": "mxfp4"})
    assert "tuned as servers call it for gpt-oss" in reasons(plan_of(mixtral))["experts"]
    half = config_of(tmp_path, "gpt-oss-120b", torch_dtype="float16")  # no product of float16 is tuned either
    with pytest.raises(PlanRefused) as refused:
        plan_of(half)
    assert "experts: float16: cutlass_fused_moe takes bfloat16 alone with mxfp4 weights" in refused.value.details


@pytest.mark.parametrize(
    ("algorithm", "arch", "inner"),
    # vllm/model_executor/layers/quantization/utils/flashinfer_fp4_moe.py and flashinfer_utils.py, for 768 // 8 channels
    [("NVFP4", "100a", 128), ("MXFP8", "100a", 128), ("FP8", "90a", 96)],
)
def test_experts_of_other_formats_are_padded(tmp_path, algorithm, arch, inner):
    path = quantized(tmp_path, "Qwen3-30B-A3B", quant_algo=algorithm, ignore=["lm_head", "*.self_attn.*"])
    op = ops(plan_of(path, arch=arch, tp=8))["experts"]
    assert (op.shape["hidden"], op.shape["intermediate"]) == (2048, inner)


def test_fp8_experts_are_padded_to_sixteen(tmp_path):
    path = quantized(tmp_path, "tiny-moe", quant_algo="FP8")
    config = {**json.loads((tmp_path / "config.json").read_text()), "moe_intermediate_size": 72}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ops(plan_of(path, tp=2))["experts"].shape["intermediate"] == 48


def test_nvfp4_products_are_padded_to_thirty_two(tmp_path):
    # vllm, layers/quantization/utils/nvfp4_utils.py, pad_nvfp4_weight_for_cutlass; sglang, modelopt_quant.py
    path = quantized(tmp_path, "Llama-3.1-8B", quant_algo="NVFP4")
    config = {**json.loads((tmp_path / "config.json").read_text()), "intermediate_size": 10880}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = ops(plan_of(path, arch="100a", tp=8))
    assert planned["down"].shape == {"n": 4096, "k": 1376}
    assert planned["gate_up"].shape == {"n": 2720, "k": 4096}
    assert "padded as vLLM and SGLang do: k 1360 → 1376" in planned["down"].notes


# --- experts without block scales on 10.0 and 10.3: vllm/model_executor/layers/fused_moe/oracle/unquantized.py, fp8.py


@pytest.mark.parametrize("arch", ["100a", "103a"])
def test_bf16_experts_go_through_trtllm(arch):
    mixtral, qwen = (ops(plan_of(model, arch=arch))["experts"] for model in ("Mixtral-8x7B", "Qwen3-30B-A3B"))
    assert (mixtral.op, mixtral.options["routing_method"]) == ("trtllm_bf16_moe", "renormalize")
    assert (qwen.op, qwen.options["routing_method"]) == ("trtllm_bf16_moe", "renormalize_naive")
    assert qwen.dtypes == {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}
    assert any("unverified" in note for note in qwen.notes)
    assert any("--ops cutlass_fused_moe plans instead" in note for note in qwen.notes)
    assert "trtllm_bf16_routed_moe: the same name, another key" in found_by(qwen)


def test_bf16_experts_are_padded_where_the_kernel_wants_it():
    op = ops(plan_of("Qwen3-30B-A3B", arch="100a", tp=4))["experts"]
    assert (op.shape["hidden"], op.shape["intermediate"]) == (2048, 256)
    assert any("vLLM 0.28 does not, and cannot run it): intermediate 192 → 256" in note for note in op.notes)
    assert not any("padded" in note for note in ops(plan_of("Qwen3-30B-A3B", arch="100a"))["experts"].notes)


@pytest.mark.parametrize(("arch", "op"), [("100a", "trtllm_fp8_per_tensor_scale_moe"), ("120f", "cutlass_fused_moe")])
def test_fp8_experts_go_through_trtllm_where_there_is_one(tmp_path, arch, op):
    path = quantized(tmp_path, "Qwen3-30B-A3B", quant_algo="FP8", ignore=["lm_head", "*.self_attn.*"])
    found = ops(plan_of(path, arch=arch, tp=8))["experts"]
    assert (found.op, found.dtypes["a"], found.shape["intermediate"]) == (op, "float8_e4m3fn", 96)
    if op.startswith("trtllm"):
        assert "not with TP, DP and EP together" in found_by(found)
        assert "trtllm_fp8_per_tensor_scale_routed_moe (FlashInfer 0.6.17 on), which has no adapter" in found_by(found)
        assert "pads intermediate sizes to 128" in found_by(found)  # sglang, srt/layers/moe/fused_moe_triton/layer.py


def test_mixtral_in_fp8_is_looked_up_by_vllm_alone(tmp_path):
    found = ops(plan_of(quantized(tmp_path, "Mixtral-8x7B", quant_algo="FP8"), arch="100a"))["experts"]
    assert found.op == "trtllm_fp8_per_tensor_scale_moe"
    assert "asks for no tuned op for this model" in found_by(found)


def test_cutlass_is_planned_where_it_is_asked_for():
    plan = plan_of("Mixtral-8x7B", arch="100a", ops=["qkv", "cutlass_fused_moe"])
    assert {name: op.op for name, op in ops(plan).items()} == {"qkv": "mm_bf16", "experts": "cutlass_fused_moe"}
    assert "by itself or with --moe-backend flashinfer_cutlass" in found_by(ops(plan)["experts"])
    both = plan_of("Mixtral-8x7B", arch="100a", ops=["trtllm_bf16_moe", "cutlass_fused_moe"])
    assert ops(both)["experts"].op == "trtllm_bf16_moe"


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        ("Qwen3-30B-A3B", {"norm_topk_prob": False}, "vLLM has no such router for it, and chooses cutlass_fused_moe"),
        ("Qwen3-30B-A3B", {"torch_dtype": "float16"}, "float16: it writes bfloat16; vLLM chooses it and refuses"),
        ("gpt-oss-120b", {"quantization_config": None}, "it takes no bias; vLLM runs such experts through Triton"),
        ("Mixtral-8x7B", {"model_type": "minimax_m2"}, "how minimax_m2 routes tokens has no counterpart"),
        ("Mixtral-8x7B", {"hidden_size": 4128}, "blocks of 64 columns, the hidden size is 4128"),
    ],
)
def test_what_trtllm_does_not_take_goes_through_cutlass_with_the_reason(tmp_path, base, changes, reason):
    op = ops(plan_of(config_of(tmp_path, base, **changes), arch="100a"))["experts"]
    assert op.op == "cutlass_fused_moe"
    assert [reason in note for note in op.notes if note.startswith("trtllm_bf16_moe is not planned: ")] == [True]


def test_fp8_experts_of_a_float16_model_go_through_cutlass(tmp_path):
    path = quantized(tmp_path, "Qwen3-30B-A3B", quant_algo="FP8")
    config = {**json.loads((tmp_path / "config.json").read_text()), "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    op = ops(plan_of(path, arch="100a"))["experts"]
    assert op.op == "cutlass_fused_moe"
    assert any("vLLM chooses cutlass_fused_moe itself" in note for note in op.notes)


def test_experts_that_hold_no_whole_blocks_are_left_out_and_the_rest_is_planned():
    # vllm/model_executor/layers/fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape: only in 0.33
    plan = plan_of("Qwen3-30B-A3B-FP8", arch="100a", tp=4)
    assert "192 channels per rank, not whole" in reasons(plan)["experts"]
    assert "Triton" in reasons(plan)["experts"]
    assert ops(plan)["router"].shape == {"n": 128, "k": 2048}
    assert ops(plan_of("Qwen3-30B-A3B-FP8", arch="100a", tp=4, ep=4))["experts"].shape["intermediate"] == 768


def test_experts_write_the_model_s_dtype(tmp_path):
    op = ops(plan_of(config_of(tmp_path, "tiny-moe", torch_dtype="float16"), ops=["experts"]))["experts"]
    assert op.dtypes == {"a": "float16", "b": "float16", "out": "float16"}


# --- backends: vllm/model_executor/kernels/linear/__init__.py; sglang srt/layers/quantization/fp4_utils.py, fp8_utils.py


@pytest.mark.parametrize(("arch", "backend"), [("100a", "cute-dsl"), ("103a", "cute-dsl"), ("120f", "cutlass")])
@pytest.mark.parametrize(("algorithm", "adapter"), [("NVFP4", "mm_fp4"), ("MXFP8", "mm_mxfp8")])
def test_block_scaled_products_take_the_backend_that_servers_name(tmp_path, algorithm, adapter, arch, backend):
    op = ops(plan_of(quantized(tmp_path, "Llama-3.1-8B", quant_algo=algorithm), arch=arch))["qkv"]
    assert (op.op, op.backends) == (adapter, (backend,))
    assert f"ask for the backend {backend}, and find its entries" in found_by(op)


def test_another_backend_is_taken_and_said(tmp_path):
    path = quantized(tmp_path, "Llama-3.1-8B", quant_algo="NVFP4")
    op = ops(plan_of(path, arch="100a", backends={"mm_fp4": ["cudnn", "cutlass"]}))["qkv"]
    assert op.backends == ("cudnn", "cutlass")
    assert "they find no entry of these" in found_by(op)
    with pytest.raises(PlanRefused, match="cute-dsl competes with no other"):
        plan_of(path, arch="100a", backends={"mm_fp4": ["cute-dsl", "cutlass"]})


def test_mxfp4_products_have_a_backend_that_takes_blocks_of_32(tmp_path):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 32}, "input_activations": {"num_bits": 4}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], **group}}}
    path = config_of(tmp_path, "Llama-3.1-8B", quantization_config=quantization)
    assert ops(plan_of(path, arch="100a"))["qkv"].backends == ("cute-dsl",)
    there = ops(plan_of(path, arch="120f"))["qkv"]
    assert there.backends == ("cudnn",)
    assert "they find no entry of these" in found_by(there)
    refused = plan_of(path, arch="120f", backends={"mm_fp4": ["cutlass"]})
    assert "no blocks of 32" in reasons(refused)["qkv"]


# --- who finds them


@pytest.mark.parametrize(
    ("model", "arch", "op", "said"),
    [
        ("Llama-3.3-70B-FP8", "90a", "qkv", "SGLang (0.5.23) finds these entries with a modelopt FP8 checkpoint; vLLM"),
        ("Llama-3.3-70B-FP8", "100a", "qkv", "vLLM (0.28, 0.33) finds these entries"),
        ("Mixtral-8x7B", "90a", "experts", "--moe-backend flashinfer_cutlass (its choice here is Triton)"),
        ("Mixtral-8x7B", "90a", "experts", "flashinfer_cutlass and SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1"),
        ("Mixtral-8x7B", "100a", "experts", "hands it chosen experts for this model, and finds none"),
        (
            "Qwen3-30B-A3B",
            "103a",
            "experts",
            "vLLM (0.28, 0.33) chooses this op itself; SGLang (0.5.23) with --moe-runn",
        ),
        ("Mixtral-8x7B", "110a", "experts", "does not take this op on compute capability 11.0"),
        ("Mixtral-8x7B", "120f", "experts", "which it chooses itself without data parallelism"),
        ("DeepSeek-V3", "100a", "experts", "SGLang (0.5.23) lays them out otherwise under the same key"),
    ],
)
def test_the_plan_says_which_server_finds_an_op(model, arch, op, said):
    planned = ops(plan_of(model, arch=arch))[op]
    assert said in found_by(planned) and not planned.unserved


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("90a", "run unquantized products through torch"), ("100a", "run unquantized products through torch"),
     ("89", "load none below compute capability 9.0")],
)  # fmt: skip
def test_the_plan_says_why_no_server_finds_an_op(arch, reason):
    plan = plan_of("Llama-3.1-8B", arch=arch)
    assert ops(plan)["qkv"].unserved == f"vLLM (0.28, 0.33) and SGLang (0.5.23) {reason}"
    assert not any("vLLM" in note for note in ops(plan)["qkv"].notes)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert replace(plan, ops=tuple(replace(op, unserved="") for op in plan.ops)).digest == plan.digest


def test_what_a_server_may_look_up_has_no_such_field():
    told = {op["name"]: op for op in plan_of("Llama-3.3-70B-FP8", arch="90a").to_json()["ops"]}
    assert told["lm_head"]["unserved"] and "unserved" not in told["qkv"]


@pytest.mark.parametrize(
    ("model", "arch", "none"),
    [
        ("Llama-3.1-8B", "90a", True), ("Llama-3.1-8B", "100a", True), ("Llama-3.3-70B-FP8", "89", True),
        ("Llama-3.3-70B-FP8", "90a", False), ("Mixtral-8x7B", "90a", False), ("DeepSeek-V3", "90a", True),
    ],
)  # fmt: skip
def test_a_plan_that_no_server_looks_up_says_so(model, arch, none):
    assert any("no entry of this plan is looked up" in note for note in plan_of(model, arch=arch).notes) is none


def test_people_read_once_that_no_server_finds_anything():
    text = describe(plan_of("Llama-3.1-8B"))
    assert text.count("only by callers of FlashInfer itself: vLLM") == 1 and "no server finds" not in text
    mixed = describe(plan_of("Llama-3.3-70B-FP8"))
    assert "lm_head: no server finds these entries" in mixed


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.6.18", "under the same key: leave this op out there"), ("0.7.0", "which is another key: it finds none")],
)
def test_the_layout_of_fp8_block_weights_is_a_key_s_matter_from_0_7_on(version, said):
    assert said in found_by(ops(plan_of("DeepSeek-V3", arch="100a", tp=8, version=version))["experts"])


def test_a_router_that_vllm_keeps_to_itself(tmp_path):
    config = {**find_model("DeepSeek-V3").config, "model_type": "deepseek_v2"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert "chosen experts, not router logits" in found_by(ops(plan_of(str(path), arch="100a"))["experts"])


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "fp8", "activation_scheme": "dynamic"}, {"quant_method": "fbgemm_fp8"}],
)
def test_activations_scaled_per_token_are_left_out(tmp_path, quantization):
    for base, part in (("Llama-3.1-8B", "qkv"), ("Mixtral-8x7B", "experts")):
        plan = plan_of(config_of(tmp_path, base, quantization_config=quantization), arch="100a")
        assert "takes one scale" in reasons(plan)[part]
