"""What is read of a model: where it is found, its sizes in each family, how it is quantized."""

import json

import pytest
from planning_samples import config_of, ops, plan_of, reasons, write_config

from pipeline.contract.plan import Layout
from pipeline.planning.model_config import read_model_config
from pipeline.planning.model_source import ModelUnknown, ModelUnreadable, bundled_names, find_model
from pipeline.planning.problems import PlanRefused, Problems
from pipeline.planning.quantization import Kind, Modules, read_quantization
from pipeline.planning.sharding import model_parts

# Billions of parameters as published with each model.
PUBLISHED = {
    "Llama-3.1-8B": 8.030, "Llama-3.3-70B-FP8": 70.55, "Qwen3-8B": 8.19, "Qwen3-30B-A3B": 30.53,
    "Qwen3-30B-A3B-FP8": 30.53, "Mixtral-8x7B": 46.70, "DeepSeek-V3": 671.0, "gpt-oss-120b": 116.83,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_products_add_up_to_the_published_size(name):
    problems = Problems()
    config = find_model(name).config
    model, quantization = read_model_config(name, config, problems), read_quantization(config, problems)
    parts = model_parts(model, Layout(), quantization, problems)
    problems.check()
    total = model.vocab * model.hidden  # the input embedding
    for part in parts:  # of the merged gate and up only one expert's rows are in `n`; down has half as many
        total += len(part.layers) * part.n * part.k * (part.moe.experts * 3 // 2 if part.moe else 1)
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_names_and_hub_ids_of_bundled_models():
    assert find_model("llama-3.1-8b").name == "Llama-3.1-8B" and find_model(" TINY ").name == "tiny"
    assert find_model("deepseek-ai/DeepSeek-V3").name == "DeepSeek-V3"  # without a network
    with pytest.raises(ModelUnknown) as caught:
        find_model("lama-3.1-8b")
    assert "did you mean Llama-3.1-8B?" in caught.value.hint
    assert all(name in caught.value.hint for name in bundled_names())


def test_folder_and_file_are_the_same_model_with_the_quantization_beside_it(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ModelUnreadable, match=r"contains no config\.json"):
        find_model(str(folder))
    (folder / "config.json").write_text(json.dumps(find_model("tiny").config))
    assert find_model(str(folder)) == find_model(str(folder / "config.json"))
    assert find_model(str(folder)).name == "my-model"
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    found = read_quantization(find_model(str(folder)).config, Problems())
    assert found.scheme(["model.layers.0.mlp.up_proj"]).kind is Kind.FP8_TENSOR
    beside.write_text("{}")
    with pytest.raises(ModelUnreadable, match="no quantization"):
        find_model(str(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a":\n ,}', r"config.json:2:2: not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[" * 100_000, "not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"), (b"[]", "no JSON object"),
        (b" " * (9 << 20), "too large"),
    ],
)  # fmt: skip
def test_broken_config_is_one_clear_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelUnreadable, match=message):
        find_model(str(tmp_path))


GENERAL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def general(family, *sizes, vocab, **more):
    return {"model_type": family, **dict(zip(GENERAL, sizes, strict=True)), "vocab_size": vocab, **more}


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS = {
    "Qwen2.5-7B": general("qwen2", 3584, 18944, 28, 28, 4, vocab=152064),
    "Mistral-Nemo": general("mistral", 5120, 14336, 40, 32, 8, vocab=131072, head_dim=128),
    "GLM-4-9B-0414": general("glm4", 4096, 13696, 40, 32, 2, vocab=151552, head_dim=128),
    "gemma-2-9b": general("gemma2", 3584, 14336, 42, 16, 8, vocab=256000),  # 256 channels per head unless it says
    "phi-4": general("phi3", 5120, 17920, 40, 40, 10, vocab=100352),
    "Qwen1.5-MoE-A2.7B": general(
        "qwen2_moe", 2048, 5632, 24, 16, 16, vocab=151936,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
    ),
    "GLM-4.5-Air": general(
        "glm4_moe", 4096, 10944, 46, 96, 8, vocab=151552, head_dim=128,
        moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=1,
    ),
    "MiniMax-M2": general(
        "minimax_m2", 3072, 1536, 62, 48, 8, vocab=200064, head_dim=128,
        num_local_experts=256, num_experts_per_tok=8,
        quantization_config={**BLOCKS, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "DeepSeek-V2-Lite": general(
        "deepseek_v2", 2048, 10944, 27, 16, 16, vocab=102400, **LATENT, q_lora_rank=None,
        moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, moe_layer_freq=1,
    ),
    "Kimi-K2": general(
        "kimi_k2", 7168, 18432, 61, 64, 64, vocab=163840, **LATENT, q_lora_rank=1536,
        moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1,
    ),
}  # fmt: skip


def config(tmp_path, name, **changes):
    return write_config(tmp_path, {"torch_dtype": "bfloat16", **MODELS[name], **changes})


@pytest.mark.parametrize(
    ("name", "layout", "shapes"),
    [
        ("Qwen2.5-7B", {"tp": 4}, {
            "qkv": (1152, 3584), "o": (3584, 896), "gate_up": (9472, 3584), "down": (3584, 4736),
            "lm_head": (38016, 3584),
        }),
        ("Mistral-Nemo", {"tp": 2}, {"qkv": (3072, 5120), "o": (5120, 2048), "lm_head": (65536, 5120)}),
        ("GLM-4-9B-0414", {"tp": 4}, {"qkv": (1280, 4096), "o": (4096, 1024), "gate_up": (6848, 4096)}),
        ("gemma-2-9b", {"tp": 2}, {"qkv": (4096, 3584), "o": (3584, 2048), "lm_head": (128000, 3584)}),
        ("phi-4", {"tp": 2}, {"qkv": (3840, 5120), "o": (5120, 2560), "gate_up": (17920, 5120)}),
        ("Qwen1.5-MoE-A2.7B", {"tp": 4}, {
            "qkv": (1536, 2048), "router": (60, 2048), "shared_gate_up": (2816, 2048), "shared_down": (2048, 1408),
        }),
        ("GLM-4.5-Air", {"tp": 4}, {"qkv": (3584, 4096), "gate_up": (5472, 4096), "shared_down": (4096, 352)}),
        ("MiniMax-M2", {"tp": 4}, {"qkv": (2048, 3072), "o": (3072, 1536), "lm_head": (50016, 3072)}),
        ("DeepSeek-V2-Lite", {"tp": 2}, {
            "q": (1536, 2048), "kv_a": (576, 2048), "kv_b": (2048, 512), "o": (2048, 1024), "router": (64, 2048),
            "shared_gate_up": (2816, 2048), "shared_down": (2048, 1408),
        }),
        # each rank has other tokens in the shared expert: vllm/config/parallel.py, use_sequence_parallel_moe
        ("DeepSeek-V2-Lite", {"tp": 2, "dp": 2, "ep": 4}, {"shared_gate_up": (5632, 2048), "shared_down": (2048, 2816)}),
        ("Kimi-K2", {"tp": 8, "ep": 8}, {
            "fused_qkv_a": (2112, 7168), "q_b": (1536, 1536), "kv_b": (2048, 512), "o": (7168, 1024),
            "gate_up": (4608, 7168), "shared_gate_up": (512, 7168), "router": (384, 7168), "lm_head": (20480, 7168),
        }),
    ],
)  # fmt: skip
def test_products_per_rank(tmp_path, name, layout, shapes):
    planned = ops(plan_of(config(tmp_path, name), arch="cpu-x86_64", **layout))
    assert {part: tuple(planned[part].shape.values()) for part in shapes} == shapes


@pytest.mark.parametrize(
    ("name", "layout", "experts"),
    [
        ("Qwen1.5-MoE-A2.7B", {"tp": 4}, (60, 60, 2048, 352, 4)), ("GLM-4.5-Air", {"tp": 4}, (128, 128, 4096, 352, 8)),
        ("DeepSeek-V2-Lite", {"tp": 2}, (64, 64, 2048, 704, 6)), ("Kimi-K2", {"tp": 8, "ep": 8}, (384, 48, 7168, 2048, 8)),
    ],
)  # fmt: skip
def test_experts_per_rank(tmp_path, name, layout, experts):
    op = ops(plan_of(config(tmp_path, name), **layout))["experts"]
    assert op.op == "cutlass_fused_moe"
    assert tuple(op.shape[n] for n in ("experts", "local_experts", "hidden", "intermediate", "top_k")) == experts


def test_layers_of_each_kind_and_what_a_family_leaves_out(tmp_path):
    glm = plan_of(config(tmp_path, "GLM-4.5-Air"))
    assert (ops(glm)["gate_up"].layers, ops(glm)["experts"].layers) == (1, 45)
    assert "float32 weights" in reasons(glm)["router"] and "mtp" in reasons(glm)
    qwen = plan_of(config(tmp_path, "Qwen1.5-MoE-A2.7B"))
    assert "gate_up" not in ops(qwen) and "one row" in reasons(qwen)["shared_expert_gate"]
    stepped = ops(plan_of(config(tmp_path, "Qwen1.5-MoE-A2.7B", decoder_sparse_step=2, intermediate_size=4096)))
    assert (stepped["gate_up"].layers, stepped["experts"].layers) == (12, 12)
    minimax = reasons(plan_of(config(tmp_path, "MiniMax-M2"), arch="100a", tp=4))
    assert "minimax_m2 routes tokens" in minimax["experts"]


# --- text_config: the language model of a model with several towers


def towers(tmp_path, outer, text, **more):
    return write_config(tmp_path, {"model_type": outer, "text_config": text, "vision_config": {"depth": 1}, **more})


SPARSE = {
    # google/gemma-3-12b-it leaves out vocab_size and head_dim, gemma-3-4b-it the heads as well
    "gemma3": ({"model_type": "gemma3_text", **dict(zip(GENERAL, (3840, 15360, 48, 16, 8), strict=True))},
               {"qkv": (8192, 3840), "lm_head": (262208, 3840)}),
    # llava-hf/llava-1.5-7b-hf says nothing but the vocabulary
    "llava": ({"model_type": "llama", "vocab_size": 32064}, {"qkv": (12288, 4096), "lm_head": (32064, 4096)}),
    "llava-13b": ({"model_type": "llama", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40},
                  {"qkv": (15360, 5120)}),  # key-value heads as many as heads
    "qwen3_vl": ({"model_type": "qwen3_vl_text", "hidden_size": 2560, "num_key_value_heads": 8, "head_dim": 128},
                 {"qkv": (6144, 2560), "gate_up": (44032, 2560)}),
}  # fmt: skip


@pytest.mark.parametrize("outer", SPARSE)
@pytest.mark.parametrize("typed", [True, False])
def test_a_sparse_text_config_means_the_class_s_values(tmp_path, outer, typed):
    text, shapes = SPARSE[outer]
    kept = {key: value for key, value in text.items() if typed or key != "model_type"}
    plan = plan_of(towers(tmp_path, outer.partition("-")[0], kept))
    assert {part: tuple(ops(plan)[part].shape.values()) for part in shapes} == shapes
    assert "vision" in reasons(plan)
    assert any(note.startswith("config.json leaves out ") for note in plan.notes)


def test_at_the_top_of_a_config_a_missing_size_is_refused(tmp_path):
    text = {key: value for key, value in MODELS["Qwen2.5-7B"].items() if key != "vocab_size"}
    with pytest.raises(PlanRefused, match="vocab_size is missing"):
        plan_of(write_config(tmp_path, text))


@pytest.mark.parametrize(
    ("outer", "model", "same"),
    [("qwen3_vl", "qwen3_vl_text", "Qwen3-8B"), ("qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3-30B-A3B"),
     ("qwen2_5_vl", "qwen2_5_vl_text", "Qwen3-8B"), ("x_vl", "llama", "tiny")],
)  # fmt: skip
def test_the_language_model_of_a_vl_model_is_planned_as_its_family(tmp_path, outer, model, same):
    plan = plan_of(towers(tmp_path, outer, {**find_model(same).config, "model_type": model}), arch="100a")
    assert "vision" in reasons(plan) and plan.digest == plan_of(same, arch="100a").digest


def test_an_older_config_has_all_fields_of_its_vl_model_at_the_top(tmp_path):
    flat = {**find_model("Qwen3-8B").config, "model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}
    plan = plan_of(write_config(tmp_path, flat))
    assert "vision" in reasons(plan) and plan.digest == plan_of("Qwen3-8B").digest


@pytest.mark.parametrize(
    ("base", "key"),
    [("DeepSeek-V3", "n_routed_experts"), ("Qwen3-30B-A3B", "num_experts"), ("Mixtral-8x7B", "num_local_experts"),
     ("gpt-oss-120b", "num_local_experts")],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_without_its_number_of_experts_is_not_planned_as_dense(tmp_path, base, key, nested):
    config = {name: value for name, value in find_model(base).config.items() if name != key}
    for path in (write_config(tmp_path, {"text_config": config} if nested else config),):
        with pytest.raises(PlanRefused, match=f"{key} is missing") as caught:
            plan_of(path, arch="100a")
        assert not caught.value.details
    misspelt = write_config(tmp_path, {**config, "num_routed_experts": 8})
    with pytest.raises(PlanRefused, match=f"{key} is missing") as caught:
        plan_of(misspelt)
    assert f"num_routed_experts: servers read {key}" in caught.value.hint


@pytest.mark.parametrize(
    ("base", "key", "other"),
    [("DeepSeek-V3", "n_routed_experts", "num_local_experts"), ("Qwen3-30B-A3B", "num_experts", "num_local_experts"),
     ("Mixtral-8x7B", "num_local_experts", "num_experts")],
)  # fmt: skip
def test_the_number_of_experts_has_the_names_that_transformers_reads(tmp_path, base, key, other):
    """transformers 5 saves a qwen3_moe with num_local_experts."""
    config = dict(find_model(base).config)
    config[other] = config.pop(key)
    assert plan_of(write_config(tmp_path, config), arch="100a").digest == plan_of(base, arch="100a").digest


@pytest.mark.parametrize(
    "key",
    ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_shared_experts",
     "q_lora_rank", "kv_lora_rank", "n_group", "topk_group", "intermediate_size"],
)  # fmt: skip
def test_nothing_that_shapes_a_deepseek_is_assumed(tmp_path, key):
    config = {name: value for name, value in find_model("DeepSeek-V3").config.items() if name != key}
    with pytest.raises(PlanRefused, match=f"{key} is missing") as caught:
        plan_of(write_config(tmp_path, config), arch="100a")
    assert not caught.value.details


def test_a_text_config_without_a_type_has_the_one_above(tmp_path):
    config = dict(find_model("Qwen3-8B").config)
    kind = config.pop("model_type")
    plan = plan_of(write_config(tmp_path, {"model_type": kind, "text_config": config, "vision_config": {}}))
    assert plan.digest == plan_of("Qwen3-8B").digest


def test_a_deepseek_that_says_that_all_its_layers_are_dense_is_planned(tmp_path):
    config = {name: value for name, value in find_model("DeepSeek-V3").config.items() if "expert" not in name}
    for path in ({**config, "first_k_dense_replace": 61}, {**config, "n_routed_experts": None}):
        planned = ops(plan_of(write_config(tmp_path, {**path, "quantization_config": None}), arch="100a"))
        assert planned["gate_up"].layers == 61 and "experts" not in planned


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({"model_type": family, "hidden_size": 4096}, f"model_type '{family}' is not one that can be planned")
          for family in ("jamba", "llama4_text", "qwen3_next", "mamba2", "deepseek_v32")),
        ({"hidden_size": 4096}, "model_type is missing"),
        ({"text_config": {}}, "model_type is missing"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "model_type 'gemma3n_text' of its text_config is not one"),
        ({"model_type": "acme_vl", "text_config": {"num_hidden_layers": 2}, "vision_config": {}},
         r"model_type 'acme_vl' is not one that can be planned \(its text_config names none\)"),
        ({"model_type": "acme_vl", "text_config": {"model_type": None}}, r"'acme_vl' .* \(its text_config names none\)"),
        (dict(find_model("tiny").config) | {"num_key_value_heads": 3}, r"heads \(4\) must be divisible by num_key_value"),
        (dict(find_model("tiny").config) | {"quantization_config": {"load_in_4bit": True}}, "has no quant_method"),
        *((dict(find_model("tiny").config) | {"quantization_config": {"quant_method": method}}, f"of {method} has neither")
          for method in ("modelopt", "compressed-tensors")),
    ],
)  # fmt: skip
def test_one_thing_wrong_is_one_line(tmp_path, config, message):
    with pytest.raises(PlanRefused, match=message) as caught:
        plan_of(write_config(tmp_path, config))
    assert not caught.value.details


@pytest.mark.parametrize("value", [0, "x" * 10_000])
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Llama-3.1-8B", (*GENERAL, "vocab_size", "head_dim")),
        ("Mixtral-8x7B", ("hidden_size", "num_local_experts", "num_experts_per_tok")),
        ("Qwen3-30B-A3B", ("num_experts", "moe_intermediate_size", "decoder_sparse_step")),
        ("DeepSeek-V3", ("n_routed_experts", "v_head_dim", "moe_layer_freq")),
    ],
)
def test_a_size_that_is_none_is_one_short_line(tmp_path, model, names, value):
    for name in names:
        with pytest.raises(PlanRefused, match=f"config.json: {name} is .*, not a whole number from 1") as caught:
            plan_of(config_of(tmp_path, model, **{name: value}))
        assert not caught.value.details and len(str(caught.value)) < 200


# --- quantization_config in the spellings that checkpoints use

PROJECTION = "model.layers.7.self_attn.q_proj"


def group(**weights):
    activations = weights.pop("activations", {"num_bits": 8, "type": "float", "strategy": "tensor"})
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations}


def tensors(method, **more):
    return {"quant_method": method, **more}


def groups(**weights):
    return tensors("compressed-tensors", config_groups={"group_0": group(**weights)})


def read(quantization):
    problems = Problems()
    found = read_quantization({"quantization_config": quantization}, problems)
    assert not problems.found
    return found


F8 = {"num_bits": 8, "type": "float"}
F4 = {"num_bits": 4, "type": "float"}
MIXED = {PROJECTION: {"quant_algo": "FP8"}, "model.layers.7.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (tensors("fp8", activation_scheme="static"), Kind.FP8_TENSOR),
        # vllm-project/vllm, vllm/model_executor/layers/quantization/fp8.py: no stored scale, one per token
        (tensors("fp8", activation_scheme="dynamic"), Kind.FP8_CHANNEL),
        (tensors("fp8"), Kind.FP8_CHANNEL),
        (tensors("fp8", weight_block_size=[128, 128]), Kind.FP8_BLOCK),
        (tensors("fp8", weight_block_size="all"), Kind.OTHER),
        (tensors("fbgemm_fp8"), Kind.FP8_CHANNEL),
        (tensors("modelopt", quant_algo="FP8"), Kind.FP8_TENSOR),
        (tensors("modelopt", quant_algo="FP8_PB_WO"), Kind.FP8_BLOCK),
        (tensors("modelopt", quant_algo="W4A16_NVFP4"), Kind.OTHER),
        (tensors("modelopt_fp4", quant_algo="nvfp4"), Kind.NVFP4),
        (tensors("modelopt", quant_algo="MXFP8"), Kind.MXFP8),
        (tensors("modelopt", quant_algo="MIXED_PRECISION"), Kind.OTHER),
        (tensors("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=MIXED), Kind.FP8_TENSOR),
        (tensors("modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"x": MIXED[PROJECTION]}), Kind.NONE),
        (tensors("modelopt", config_groups={"a": group(**F8)}), Kind.FP8_TENSOR),
        # ModelOpt's own files name no quant_method
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}, Kind.NVFP4),
        ({"producer": {"name": "modelopt", "version": "0.37"}, "quant_algo": "FP8"}, Kind.FP8_TENSOR),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, Kind.NVFP4),
        ({"producer": {"name": "modelopt"}, "config_groups": {"a": group(**F4, group_size=16)}}, Kind.NVFP4),
        ({"quant_method": None, "quant_algo": "NVFP4"}, Kind.NVFP4),
        (tensors("awq", bits=4), Kind.OTHER),
        (groups(**F8, strategy="tensor"), Kind.FP8_TENSOR),
        (groups(**F8, strategy="channel"), Kind.FP8_CHANNEL),
        (groups(**F8, activations={"strategy": "token", "num_bits": 8}), Kind.FP8_CHANNEL),
        # vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py: as above
        (groups(**F8, activations={"strategy": "tensor", "dynamic": True}), Kind.FP8_CHANNEL),
        (groups(**F8, strategy="block", block_structure=[128, 128]), Kind.FP8_BLOCK),
        (groups(**F8, strategy="group", group_size=32), Kind.MXFP8),
        (groups(**F8, activations=None), Kind.OTHER),
        (groups(**F4, group_size=16), Kind.NVFP4),
        (groups(**F4, group_size=32), Kind.MXFP4),
        (groups(**F4, group_size=16, activations=None), Kind.OTHER),
        (groups(num_bits=4, type="int", group_size=128), Kind.OTHER),
    ],
)
def test_methods(config, kind):
    assert read(config).scheme([PROJECTION]).kind is kind


def test_mxfp4_is_for_experts_alone():
    assert read(tensors("mxfp4")).scheme([PROJECTION]).kind is Kind.NONE
    assert read(tensors("mxfp4")).scheme(["model.layers.0.mlp.experts"], experts=True).kind is Kind.MXFP4


@pytest.mark.parametrize("key", ["ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"])
def test_ignored_modules_stay_unquantized(key):
    found = read(tensors("fp8", activation_scheme="static", **{key: [PROJECTION]}))
    assert found.scheme([PROJECTION, "model.layers.7.self_attn.k_proj"]).kind is Kind.NONE
    assert found.scheme(["model.layers.8.self_attn.q_proj"]).kind is Kind.FP8_TENSOR


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("lm_head", "lm_head", "model.lm_heads"),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.o_proj", "model.layers.3.mlp.up_proj"),
        ("*.shared_experts.*", "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts.0.up_proj"),
        ("re:.*gate$", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.[0-2].mlp", "model.layers.2.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("*l*a*y*e*r*s*" * 3 + "x", "layers" * 3 + "x", "model.layers.3.self_attn.q_proj.layers" * 3),
    ],
)
def test_patterns(pattern, inside, outside):
    assert inside in Modules((pattern,)) and outside not in Modules((pattern,))


def test_first_group_that_names_a_module_counts_and_one_that_names_none_is_noted(tmp_path):
    narrow = {**group(**F4, group_size=16), "targets": ["re:.*mlp.*"]}
    found = read(tensors("compressed-tensors", config_groups={"a": narrow, "b": group(**F8)}))
    assert found.scheme(["model.layers.0.mlp.up_proj"]).kind is Kind.NVFP4
    assert found.scheme([PROJECTION]).kind is Kind.FP8_TENSOR
    for targets, noted in ((["Linaer"], True), (["re:.*mlp.*"], False), (["Linear"], False)):
        config = tensors("compressed-tensors", config_groups={"a": {**group(**F8), "targets": targets}})
        notes = plan_of(config_of(tmp_path, "Llama-3.1-8B", quantization_config=config)).notes
        assert [f"targets {targets[0]}, which no product" in note for note in notes].count(True) == noted, targets


# moonshotai/Kimi-K2.5 keeps it in text_config, the FP8 exports of Mistral-Small-3.1 beside it; names begin with the tower
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "listed",
    ["model.layers.7.self_attn.q_proj", "language_model.model.layers.7.self_attn*",
     "model.language_model.layers.7.self_attn", "re:.*language_model.*self_attn.*"],
)  # fmt: skip
def test_a_language_model_among_towers(inside, listed):
    quantization = {
        "quantization_config": tensors("modelopt", quant_algo="NVFP4", ignore=[listed, "re:vision_tower.*"])
    }
    text = {"hidden_size": 8, **(quantization if inside else {})}
    found = read_quantization({"text_config": text, **({} if inside else quantization)}, Problems())
    assert found.scheme([PROJECTION]).kind is Kind.NONE
    assert found.scheme(["model.layers.7.mlp.up_proj"]).kind is Kind.NVFP4


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "no regular expression"), ("a" * 501, "longer than 500"),
        ("a{99999999999}", "no regular expression"), (".*" * 6, "more than 5 repeats"),
        *((text, "repeats a group") for text in ("([a-z0-9_.]+)+!$", "(a|a)*b", "((a*)b?)+", "(?:a?){30}", "(a+){2,}")),
    ],
)  # fmt: skip
def test_an_expression_that_may_never_end_is_refused_by_name(expression, why):
    groups = {"a": {**group(**F8), "targets": [f"re:{expression}"]}}
    for field, value in (("ignore", [f"re:{expression}"]), ("config_groups", groups)):
        problems = Problems()
        config = {"config_groups": {}, field: value}
        read_quantization({"quantization_config": tensors("compressed-tensors", **config)}, problems)
        ((message, hint),) = problems.found
        assert message.startswith(f"config.json: quantization_config.{field} names 're:") and why in message and hint


@pytest.mark.parametrize(
    "expression",
    [".*lm_head.*", r"model\.layers\.\d+\.mlp\.(gate|up)_proj", r".*(self_attn|mlp)\..*_proj$", "(?:model\\.)?lm_head",
     r"^model\.layers\.[0-9]+\..*experts\..*gate.*", r"vision_tower\.[^.()*+]+\..*", "(?i)lm_head"],
)  # fmt: skip
def test_expressions_of_checkpoints_are_read(expression):
    assert read(tensors("fp8", ignore=[f"re:{expression}"])).ignored.patterns
