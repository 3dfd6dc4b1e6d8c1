"""What vLLM 0.28 and 0.33 and SGLang 0.5.23 ask FlashInfer for: sizes, backends, and who finds an entry."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning_samples import NEW, OLD, config_of, ops, plan_of, reasons

from pipeline.contract.plan import Plan
from pipeline.flashinfer.gpus import KNOWN_SM
from pipeline.flashinfer.ops import TUNED_AS
from pipeline.planning.consumers import ROWS, SGLANG, VLLM, lookups
from pipeline.planning.problems import PlanRefused
from pipeline.planning.report import describe


def quantized(tmp_path, base, algorithm, **changes):
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.self_attn.*"]}
    return config_of(tmp_path, base, quantization_config=quantization, **changes)


def found_by(op, server):
    return next(note for note in op.notes if note.startswith(server))


# --- sizes


@pytest.mark.parametrize(("tp", "inner"), [(1, 2944), (2, 1536), (4, 768), (8, 384)])
def test_mxfp4_experts_are_padded(tp, inner):
    # vllm-project/vllm, vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: 2880 // tp up to 128, hidden up to 256
    op = ops(plan_of("gpt-oss-120b", arch="100a", tp=tp))["experts"]
    assert (op.op, op.shape["hidden"], op.shape["intermediate"]) == ("trtllm_fp4_block_scale_moe", 3072, inner)
    # vllm, fused_moe/experts/trtllm_mxfp4_moe.py: the output has the columns of the model, and its shape is in the key
    assert any("2880 → 3072" in note for note in op.notes) and op.options["hidden_out"] == "2880"
    # sgl-project/sglang, srt/layers/moe/moe_runner/flashinfer_trtllm.py
    assert "--flashinfer-mxfp4-moe-precision bf16" in found_by(op, SGLANG)
    # vllm, fused_moe/oracle/mxfp4.py: FLASHINFER_CUTLASS_MXFP4_BF16, both sizes up to 128
    for version in (OLD, "0.7.2.post1", NEW):
        hopper = ops(plan_of("gpt-oss-120b", arch="90a", tp=tp, version=version))["experts"]
        assert (hopper.op, hopper.shape["hidden"], hopper.shape["intermediate"]) == ("cutlass_fused_moe", 2944, inner)
        assert hopper.dtypes == {"a": "bfloat16", "b": "uint8", "out": "bfloat16"}
        assert hopper.options == {"activation": "swiglu_oai", "bias": "true", "format": "mxfp4"}


def test_mxfp4_experts_that_no_server_asks_so_are_left_out_on_hopper(tmp_path):
    mixtral = config_of(tmp_path, "Mixtral-8x7B", quantization_config={"quant_method": "mxfp4"})
    assert "tuned as servers call it for gpt-oss" in reasons(plan_of(mixtral))["experts"]
    with pytest.raises(PlanRefused) as refused:  # no product of float16 is tuned either
        plan_of(config_of(tmp_path, "gpt-oss-120b", torch_dtype="float16"))
    assert "experts: float16: cutlass_fused_moe takes bfloat16 alone with mxfp4 weights" in refused.value.details
    assert "the rank into the keys" in reasons(plan_of("gpt-oss-120b", tp=2, version="0.7.1"))["experts"]


@pytest.mark.parametrize(
    ("algorithm", "arch", "base", "inner"),
    # vllm/model_executor/layers/quantization/utils/flashinfer_fp4_moe.py and flashinfer_utils.py, for 768 // 8 channels
    [("NVFP4", "100a", 768, 128), ("MXFP8", "100a", 768, 128), ("FP8", "90a", 768, 96), ("FP8", "90a", 576, 80)],
)
def test_experts_of_other_formats_are_padded(tmp_path, algorithm, arch, base, inner):
    path = quantized(tmp_path, "Qwen3-30B-A3B", algorithm, moe_intermediate_size=base)
    op = ops(plan_of(path, arch=arch, tp=8))["experts"]
    assert (op.shape["hidden"], op.shape["intermediate"]) == (2048, inner)


@pytest.mark.parametrize(("arch", "op"), [("100a", "trtllm_fp8_per_tensor_scale_moe"), ("120f", "cutlass_fused_moe")])
def test_fp8_experts_go_through_trtllm_where_there_is_one(tmp_path, arch, op):
    found = ops(plan_of(quantized(tmp_path, "Qwen3-30B-A3B", "FP8"), arch=arch, tp=8))["experts"]
    assert (found.op, found.dtypes["a"], found.shape["intermediate"]) == (op, "float8_e4m3fn", 96)
    half = ops(plan_of(quantized(tmp_path, "Qwen3-30B-A3B", "FP8", torch_dtype="float16"), arch="100a"))["experts"]
    assert half.op == "cutlass_fused_moe"


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


def test_experts_without_whole_blocks_are_left_out_and_the_rest_is_planned():
    # vllm/model_executor/layers/fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape: only in 0.33
    plan = plan_of("Qwen3-30B-A3B-FP8", arch="100a", tp=4)
    assert "192 channels per rank, not whole" in reasons(plan)["experts"] and "Triton" in reasons(plan)["experts"]
    assert ops(plan)["router"].shape == {"n": 128, "k": 2048}
    assert ops(plan_of("Qwen3-30B-A3B-FP8", arch="100a", tp=4, ep=4))["experts"].shape["intermediate"] == 768


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "fp8", "activation_scheme": "dynamic"}, {"quant_method": "fbgemm_fp8"}]
)
def test_activations_scaled_per_token_are_left_out(tmp_path, quantization):
    for base, part in (("Llama-3.1-8B", "qkv"), ("Mixtral-8x7B", "experts")):
        plan = plan_of(config_of(tmp_path, base, quantization_config=quantization), arch="100a")
        assert "takes one scale" in reasons(plan)[part]


# --- backends: vllm/model_executor/kernels/linear/__init__.py; sglang srt/layers/quantization/fp4_utils.py, fp8_utils.py


@pytest.mark.parametrize(("arch", "backend"), [("100a", "cute-dsl"), ("103a", "cute-dsl"), ("120f", "cutlass")])
@pytest.mark.parametrize(("algorithm", "adapter"), [("NVFP4", "mm_fp4"), ("MXFP8", "mm_mxfp8")])
def test_block_scaled_products_take_the_backend_that_servers_name(tmp_path, algorithm, adapter, arch, backend):
    op = ops(plan_of(quantized(tmp_path, "Llama-3.1-8B", algorithm), arch=arch))["down"]
    assert (op.op, op.backends) == (adapter, (backend,))
    assert all(found_by(op, server) == f"{server}: yes: asks for {backend}" for server in (VLLM, SGLANG))


def test_another_backend_is_taken_and_noted(tmp_path):
    path = quantized(tmp_path, "Llama-3.1-8B", "NVFP4")
    op = ops(plan_of(path, arch="100a", backends={"mm_fp4": ["cudnn", "cutlass"]}))["down"]
    assert op.backends == ("cudnn", "cutlass")
    assert "asks for cute-dsl alone, here cudnn+cutlass competes" in op.unserved
    some = ops(plan_of(path, arch="120f", backends={"mm_fp4": ["cudnn", "cutlass"]}))["down"]
    assert not some.unserved and "finds what cutlass won" in found_by(some, VLLM)
    with pytest.raises(PlanRefused, match="cute-dsl competes with no other"):
        plan_of(path, arch="100a", backends={"mm_fp4": ["cute-dsl", "cutlass"]})


def test_mxfp4_products_have_a_backend_that_takes_blocks_of_32(tmp_path):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 32}, "input_activations": {"num_bits": 4}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], **group}}}
    path = config_of(tmp_path, "Llama-3.1-8B", quantization_config=quantization)
    assert ops(plan_of(path, arch="100a"))["qkv"].backends == ("cute-dsl",)
    there = ops(plan_of(path, arch="120f"))["qkv"]
    assert there.backends == ("cudnn",) and "asks for cute-dsl alone" in there.unserved
    assert "no blocks of 32" in reasons(plan_of(path, arch="120f", backends={"mm_fp4": ["cutlass"]}))["qkv"]


# --- who finds them


@pytest.mark.parametrize(
    ("model", "arch", "op", "vllm", "sglang"),
    [
        ("Llama-3.3-70B-FP8", "90a", "qkv", "no: runs these products through CUTLASS", "yes: with a modelopt FP8"),
        ("Llama-3.3-70B-FP8", "100a", "qkv", "yes", "yes: with a modelopt FP8 checkpoint, those that cublas won"),
        ("Mixtral-8x7B", "90a", "experts", "yes: with --moe-backend flashinfer_cutlass (default: Triton)",
         "yes: with --moe-runner-backend flashinfer_cutlass and SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1"),
        ("Mixtral-8x7B", "100a", "experts", "yes: its own choice", "no: hands over chosen experts"),
        ("Qwen3-30B-A3B", "103a", "experts", "yes: its own choice", "yes: with --moe-runner-backend flashinfer_trtllm"),
        ("Mixtral-8x7B", "110a", "experts", "no: does not take this op here", "yes"),
        ("Mixtral-8x7B", "120f", "experts", "yes: its own choice without data parallelism", "yes"),
        ("gpt-oss-120b", "90a", "experts", "yes: with --moe-backend flashinfer_cutlass",
         "yes: with --moe-runner-backend flashinfer_mxfp4 and SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=1; pads hidden"),
        ("DeepSeek-V3", "100a", "experts", "yes: its own choice", "no: its weights have another layout under the same"),
    ],
)  # fmt: skip
def test_the_plan_says_which_server_finds_an_op(model, arch, op, vllm, sglang):
    planned = ops(plan_of(model, arch=arch))[op]
    assert found_by(planned, VLLM).startswith(f"{VLLM}: {vllm}")
    assert found_by(planned, SGLANG).startswith(f"{SGLANG}: {sglang}")
    assert not planned.unserved


def test_mixtral_in_fp8_and_routers_that_vllm_keeps_to_itself(tmp_path):
    mixtral = ops(plan_of(quantized(tmp_path, "Mixtral-8x7B", "FP8"), arch="100a"))["experts"]
    assert mixtral.op == "trtllm_fp8_per_tensor_scale_moe" and f"{SGLANG}: no" in found_by(mixtral, SGLANG)
    path = config_of(tmp_path, "DeepSeek-V3", model_type="deepseek_v2")
    assert "chosen experts, not router logits" in ops(plan_of(path, arch="100a"))["experts"].unserved


def test_the_layout_of_fp8_block_weights_is_in_keys_from_0_7_on():
    for version, said in (("0.6.18", "leave this op out there"), ("0.7.0rc1", "leave"), ("0.7.0", "another key")):
        op = ops(plan_of("DeepSeek-V3", arch="100a", tp=8, version=version))["experts"]
        assert said in found_by(op, SGLANG)


NONE = "NO SERVER GAINS BY THIS PLAN"


@pytest.mark.parametrize(
    ("model", "arch", "reason"),
    [
        ("Llama-3.1-8B", "90a", "runs unquantized products through torch"),
        ("Llama-3.1-8B", "100a", "runs unquantized products through torch"),
        ("DeepSeek-V3", "90a", "runs unquantized products through torch"),
        ("Llama-3.3-70B-FP8", "89", "loads no tuned file below compute capability 9.0"),
        (
            "tiny",
            "cpu-x86_64",
            "cpu_mm is this project's own op, for machines without a GPU: --arch h200 plans for a GPU",
        ),
    ],
)
def test_a_plan_that_no_server_gains_by_says_so_in_its_first_line(model, arch, reason):
    plan = plan_of(model, arch=arch)
    first, why, *rest = describe(plan, model).splitlines()
    assert first.startswith(NONE) and f"`pipeline build {model} --server vllm`" in first and "SERVER=vllm" in first
    assert why == f"  {VLLM} and {SGLANG}: {reason}" == f"  {ops(plan)['lm_head'].unserved}"
    assert not any(reason in line for line in rest)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert replace(plan, ops=tuple(replace(op, unserved="") for op in plan.ops)).digest == plan.digest


def test_a_plan_that_a_server_gains_by_says_which_of_its_ops(tmp_path):
    plan = plan_of("Llama-3.3-70B-FP8", arch="h200")
    text = describe(plan)
    assert NONE not in text
    assert f"looked up by {VLLM}: none\nlooked up by {SGLANG}: qkv, o, gate_up, down\n" in text
    assert "lm_head: no server looks these up" in text
    assert "--ops qkv,o,gate_up,down plans only what a server looks up" in text and "--server vllm` (" in text
    told = {op["name"]: op for op in plan.to_json()["ops"]}
    assert told["lm_head"]["unserved"] and "unserved" not in told["qkv"]


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.7.2.post1", "is run by vLLM 0.33.0 ("), (NEW, "is run by none of those that were read (vLLM 0.28.0 pins")],
)
def test_the_plan_says_which_servers_run_its_flashinfer(version, said):
    assert any(f"{version} {said}" in note for note in plan_of("Llama-3.3-70B-FP8", version=version).notes)


def test_every_op_has_one_answer_for_every_gpu_it_is_planned_on():
    for row in ROWS:
        assert row.op in TUNED_AS and set(row.sms) <= set(KNOWN_SM)
    for model in ("Mixtral-8x7B", "gpt-oss-120b", "DeepSeek-V3", "Llama-3.3-70B-FP8"):
        for sm in KNOWN_SM:
            for op in plan_of(model, arch=str(sm)).ops:
                assert not any("not known" in str(answer) for answer in lookups(op, sm, OLD).values()), (op.op, sm)


def test_docs_show_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md").read_text()
    lines = ["| op | compute capability | vLLM | SGLang |", "|---|---|---|---|"]
    for row in ROWS:
        name = f"`{row.op}`{', ' + ', '.join(row.formats) if row.formats else ''}"
        capabilities = "all" if row.sms == KNOWN_SM else ", ".join(f"{sm / 10}" for sm in row.sms)
        lines.append(f"| {name} | {capabilities} | {row.vllm} | {row.sglang} |")
    assert "\n".join(lines) in page
