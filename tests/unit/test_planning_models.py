"""Bundled models: found by name, and their facts add up to the published parameter counts."""

import json
import subprocess
import sys

import pytest

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Layout
from pipeline.planning.facts import read_facts
from pipeline.planning.find import BUNDLED, ModelUnknown, ModelUnreadable, bundled_names, find_model
from pipeline.planning.parts import model_parts
from pipeline.planning.problems import Problems
from pipeline.planning.quant import Kind, read_quantization

# Billions of parameters as published with each model.
PUBLISHED = {
    "Llama-3.1-8B": 8.030,
    "Llama-3.3-70B-FP8": 70.55,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-30B-A3B-FP8": 30.53,
    "Mixtral-8x7B": 46.70,
    "DeepSeek-V3": 671.0,
    "gpt-oss-120b": 116.83,
}
QUANTIZED = {
    "Llama-3.3-70B-FP8": Kind.FP8_TENSOR,
    "Qwen3-30B-A3B-FP8": Kind.FP8_BLOCK,
    "DeepSeek-V3": Kind.FP8_BLOCK,
    "gpt-oss-120b": Kind.MXFP4,
}


def parts_of(name, layout=None):
    problems = Problems()
    config = find_model(name).config
    facts, quantization = read_facts(name, config, problems), read_quantization(config, problems)
    parts = model_parts(facts, layout or Layout(), quantization, problems)
    problems.check()
    return facts, parts


def weights(facts, parts):
    """Elements of every weight matrix, with the input embedding."""
    total = facts.vocab * facts.hidden
    for part in parts:
        if part.moe:
            # of the merged gate and up only one expert's rows are in `n`; down has half as many
            total += len(part.layers) * part.moe.experts * part.n * part.k * 3 // 2
        else:
            total += len(part.layers) * part.n * part.k
    return total


@pytest.mark.parametrize("name", PUBLISHED)
def test_products_add_up_to_the_published_size(name):
    total = weights(*parts_of(name)) / 1e9
    assert total == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_every_bundled_model_is_held_against_a_published_size():
    assert set(bundled_names()) == {*PUBLISHED, "tiny", "tiny-moe"}


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_file_says_its_name_and_source(name):
    value = json.loads((BUNDLED / f"{name}.json").read_text())
    assert value["name"] == name
    assert set(value) <= {"name", "source", "hub", "tp", "config"}
    assert value["source"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantization_reaches_the_right_parts(name):
    _, parts = parts_of(name)
    kinds = {part.name: part.scheme.kind for part in parts}
    assert kinds["lm_head"] is Kind.NONE
    assert kinds.get("router", Kind.NONE) is Kind.NONE
    expected = QUANTIZED.get(name, Kind.NONE)
    if name == "gpt-oss-120b":
        assert kinds["experts"] is Kind.MXFP4
        assert kinds["qkv"] is Kind.NONE
    else:
        assert {kind for part, kind in kinds.items() if part not in ("lm_head", "router")} == {expected}


def test_dense_layers_of_a_sparse_model_are_counted():
    _, parts = parts_of("DeepSeek-V3")
    layers = {part.name: len(part.layers) for part in parts}
    assert layers["gate_up"] == 3
    assert layers["experts"] == layers["shared_gate_up"] == layers["router"] == 58
    assert layers["fused_qkv_a"] == 61


@pytest.mark.parametrize(("written", "name"), [("llama-3.1-8b", "Llama-3.1-8B"), (" TINY ", "tiny")])
def test_names_ignore_case(written, name):
    assert find_model(written).name == name


def test_a_hub_id_that_is_bundled_needs_no_network():
    assert find_model("deepseek-ai/DeepSeek-V3").name == "DeepSeek-V3"


def test_unknown_model_lists_all_and_a_near_one():
    with pytest.raises(ModelUnknown) as caught:
        find_model("lama-3.1-8b")
    assert "did you mean Llama-3.1-8B?" in caught.value.hint
    assert all(name in caught.value.hint for name in bundled_names())


def test_folder_and_file_are_the_same_model(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_model("tiny").config))
    by_folder, by_file = find_model(str(folder)), find_model(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder.name == "my-model"


def test_quantization_beside_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(find_model("tiny").config))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    found = find_model(str(tmp_path))
    assert read_quantization(found.config, Problems()).scheme(["model.layers.0.mlp.up_proj"]).kind is Kind.FP8_TENSOR
    beside.write_text("{}")
    with pytest.raises(ModelUnreadable, match="no quantization"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a":\n ,}', r"config.json:2:2: not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[]", "no JSON object"),
        (b" " * (9 << 20), "too large"),
    ],
)
def test_broken_config_is_one_clear_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelUnreadable, match=message):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    "model", ["", "./nothing", "/nothing/config.json", "x.json", "~nobody-here/x", "a\0b", "x" * 5000]
)
def test_names_that_lead_nowhere(model):
    with pytest.raises(UsageError):
        find_model(model)


def test_empty_folder(tmp_path):
    with pytest.raises(ModelUnreadable, match=r"holds no config\.json"):
        find_model(str(tmp_path))


def test_planning_imports_only_the_standard_library():
    code = (
        "import sys; import pipeline.planning.arguments, pipeline.planning.show;"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('pydantic', 'huggingface_hub', 'packaging', 'jinja2', 'docker', 'torch', 'rich', 'requests')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
