"""quantization_config in the spellings that checkpoints use."""

import json

import pytest
from planning_samples import config_of, plan_of

from pipeline.planning import parts
from pipeline.planning.find import find_model
from pipeline.planning.problems import PlanRefused, Problems
from pipeline.planning.quant import Kind, Modules, read_quantization

PROJECTION = "model.layers.7.self_attn.q_proj"


def group(**weights):
    activations = weights.pop("activations", {"num_bits": 8, "type": "float", "strategy": "tensor"})
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations}


def tensors(method, **more):
    return {"quant_method": method, **more}


def groups(**weights):
    return tensors("compressed-tensors", config_groups={"group_0": group(**weights)})


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
        (tensors("modelopt", quant_algo="NVFP4"), Kind.NVFP4),
        (tensors("modelopt", quant_algo="FP8_PB_WO"), Kind.FP8_BLOCK),
        (tensors("modelopt", quant_algo="W4A16_NVFP4"), Kind.OTHER),
        (tensors("modelopt_fp4", quant_algo="nvfp4"), Kind.NVFP4),
        (tensors("modelopt", quant_algo="MXFP8"), Kind.MXFP8),
        (tensors("modelopt", quant_algo="MIXED_PRECISION"), Kind.OTHER),
        (tensors("modelopt", config_groups={"a": group(num_bits=8, type="float")}), Kind.FP8_TENSOR),
        (tensors("awq", bits=4), Kind.OTHER),
        (tensors("gptq"), Kind.OTHER),
        (groups(num_bits=8, type="float", strategy="tensor"), Kind.FP8_TENSOR),
        (groups(num_bits=8, type="float", strategy="channel"), Kind.FP8_CHANNEL),
        (
            groups(num_bits=8, type="float", strategy="tensor", activations={"strategy": "token", "num_bits": 8}),
            Kind.FP8_CHANNEL,
        ),
        # vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py: as above
        (
            groups(num_bits=8, type="float", strategy="tensor", activations={"strategy": "tensor", "dynamic": True}),
            Kind.FP8_CHANNEL,
        ),
        (
            groups(num_bits=8, type="float", strategy="tensor", activations={"strategy": "tensor", "dynamic": False}),
            Kind.FP8_TENSOR,
        ),
        (groups(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), Kind.FP8_BLOCK),
        (groups(num_bits=8, type="float", strategy="group", group_size=32), Kind.MXFP8),
        (groups(num_bits=8, type="float", strategy="tensor", activations=None), Kind.OTHER),
        (groups(num_bits=4, type="float", group_size=16), Kind.NVFP4),
        (groups(num_bits=4, type="float", group_size=32), Kind.MXFP4),
        (groups(num_bits=4, type="float", group_size=16, activations=None), Kind.OTHER),
        (groups(num_bits=4, type="int", group_size=128), Kind.OTHER),
        (groups(num_bits=8, type="int"), Kind.OTHER),
    ],
)
def test_methods(config, kind):
    problems = Problems()
    found = read_quantization({"quantization_config": config}, problems)
    assert not problems.found
    assert found.scheme([PROJECTION]).kind is kind


def test_none_is_unquantized():
    assert read_quantization({}, Problems()).scheme([PROJECTION]).kind is Kind.NONE


def test_mxfp4_is_for_experts_alone():
    found = read_quantization({"quantization_config": tensors("mxfp4")}, Problems())
    assert found.scheme([PROJECTION]).kind is Kind.NONE
    assert found.scheme(["model.layers.0.mlp.experts"], experts=True).kind is Kind.MXFP4


@pytest.mark.parametrize("key", ["ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"])
def test_ignored_modules_stay_unquantized(key):
    config = {"quantization_config": tensors("fp8", activation_scheme="static", **{key: [PROJECTION]})}
    found = read_quantization(config, Problems())
    assert found.scheme([PROJECTION, "model.layers.7.self_attn.k_proj"]).kind is Kind.NONE
    assert found.scheme(["model.layers.8.self_attn.q_proj"]).kind is Kind.FP8_TENSOR


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("lm_head", "lm_head", "model.lm_heads"),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("self_attn", "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn2.q_proj"),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.o_proj", "model.layers.3.mlp.up_proj"),
        ("*.shared_experts.*", "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts.0.up_proj"),
        ("re:.*gate$", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.?.mlp", "model.layers.3.mlp.up_proj", "model.layers.13.mlp.up_proj"),
        ("model.layers.[0-2].mlp", "model.layers.2.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        ("*l*a*y*e*r*s*" * 3 + "x", "layers" * 3 + "x", "model.layers.3.self_attn.q_proj.layers" * 3),
    ],
)
def test_patterns(pattern, inside, outside):
    assert inside in Modules((pattern,))
    assert outside not in Modules((pattern,))


def test_first_group_that_names_a_module_counts():
    narrow = {**group(num_bits=4, type="float", group_size=16), "targets": ["re:.*mlp.*"]}
    wide = group(num_bits=8, type="float", strategy="tensor")
    config = tensors("compressed-tensors", config_groups={"a": narrow, "b": wide})
    found = read_quantization({"quantization_config": config}, Problems())
    assert found.scheme(["model.layers.0.mlp.up_proj"]).kind is Kind.NVFP4
    assert found.scheme([PROJECTION]).kind is Kind.FP8_TENSOR


def test_a_group_that_holds_no_product_is_told(tmp_path):
    wide = group(num_bits=8, type="float", strategy="tensor")
    for targets, told in ((["Linaer"], True), (["re:.*mlp.*"], False), (["Linear"], False)):
        config = tensors("compressed-tensors", config_groups={"a": {**wide, "targets": targets}})
        notes = plan_of(config_of(tmp_path, "Llama-3.1-8B", quantization_config=config)).notes
        assert [f"targets {targets[0]}, which no product" in note for note in notes].count(True) == told, targets


# moonshotai/Kimi-K2.5 keeps it in text_config, the FP8 exports of Mistral-Small-3.1 beside it; names begin with the tower
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "listed",
    [
        "model.layers.7.self_attn.q_proj",
        "language_model.model.layers.7.self_attn.q_proj",
        "model.language_model.layers.7.self_attn",
        "language_model.model.layers.7.self_attn*",
        "re:.*language_model.*self_attn.*",
        "re:model\\.layers\\.7\\.self_attn.*",
    ],
)
def test_a_language_model_among_towers(inside, listed):
    quantization = {
        "quantization_config": tensors("modelopt", quant_algo="NVFP4", ignore=[listed, "re:vision_tower.*"])
    }
    text = {"hidden_size": 8, **(quantization if inside else {})}
    found = read_quantization({"text_config": text, **({} if inside else quantization)}, Problems())
    assert found.scheme([PROJECTION]).kind is Kind.NONE
    assert found.scheme(["model.layers.7.mlp.up_proj"]).kind is Kind.NVFP4


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        {"quant_method": "fp8", "ignore": ["re:("]},
        {"quant_method": "fp8", "exclude_modules": ["re:" + "(" * 5000 + ")" * 5000]},
        {"quant_method": "fp8", "ignored_layers": ["re:a{99999999999}"]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:("]}}},
        {"quant_method": None},
        [1],
        {"quant_method": ""},
    ],
)
def test_nonsense_is_a_problem(config):
    problems = Problems()
    read_quantization({"quantization_config": config}, problems)
    assert problems.found


_ENDLESS = "re:([a-z0-9_.]+)+!$"


@pytest.mark.parametrize(
    ("field", "quantization"),
    [
        ("ignore", tensors("compressed-tensors", ignore=["lm_head", "re:.*gate$", _ENDLESS])),
        ("exclude_modules", tensors("modelopt", quant_algo="FP8", exclude_modules=[_ENDLESS])),
        (
            "config_groups",
            tensors(
                "compressed-tensors", config_groups={"a": {**group(num_bits=8, type="float"), "targets": [_ENDLESS]}}
            ),
        ),
    ],
)
def test_an_expression_without_end_is_refused_by_name(tmp_path, monkeypatch, field, quantization):
    """Only the copy of the process that tries it first meets it: it would hold this test up for ever."""
    monkeypatch.setattr("pipeline.planning.expressions.SECONDS", 1)
    with pytest.raises(PlanRefused) as caught:
        plan_of(config_of(tmp_path, "Llama-3.1-8B", quantization_config=quantization))
    told = f"config.json: quantization_config.{field} names '{_ENDLESS}', which takes more than"
    assert caught.value.message.startswith(told)
    assert "repeat inside a repeat" in caught.value.hint


def test_without_expressions_no_copy_of_the_process_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.planning.expressions.beside", None)
    config = tensors("modelopt", quant_algo="FP8", exclude_modules=["lm_head", "model.layers.*.mlp"])
    assert plan_of(config_of(tmp_path, "Llama-3.1-8B", quantization_config=config)).ops


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-120b"])
@pytest.mark.parametrize("towers", [False, True])
def test_all_that_a_plan_asks_was_tried_before(tmp_path, monkeypatch, model, towers):
    tried, asked = set(), set()
    monkeypatch.setattr(parts, "try_all", lambda _found, names, _problems: tried.update(names) or True)
    monkeypatch.setattr(Modules, "__contains__", lambda _self, name: asked.add(name) or False)
    config = dict(find_model(model).config)
    quantization = tensors("fp8", ignore=["re:x"])
    inner = {**config, "quantization_config": quantization}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": inner} if towers else inner))
    plan_of(str(path))
    assert asked
    assert asked <= tried
