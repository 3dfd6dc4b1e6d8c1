"""Plans: which ops stand for a model on which device, what is left out and why, and the digest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_samples import NEW, OLD, config_of, fp8, ops, plan_of, reasons, write_config

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import Layout, Plan
from pipeline.flashinfer.ops import TUNED_AS
from pipeline.planning.model_source import bundled_names, find_model
from pipeline.planning.problems import PlanRefused
from pipeline.planning.report import describe

# Over versions 0.6.16.post3 and 0.7.4 and four layouts: a change that is meant is a new file, and new caches for all
DIGESTS = json.loads((Path(__file__).parent / "plan_digests.json").read_text())


@pytest.mark.parametrize("name", DIGESTS)
def test_plans_of_the_bundled_models_mean_what_they_meant(name):
    model, arch = name.split()
    digests = []
    for version in (OLD, NEW):
        for layout in ({}, {"tp": 4}, {"tp": 8, "ep": 8}, {"tp": 2, "dp": 2, "ep": 4}):
            try:
                digests.append(plan_of(model, arch=arch, version=version, **layout).digest)
            except PlanRefused:
                digests.append("refused")
    assert sha256_json(digests)[:16] == DIGESTS[name]


def test_shapes_of_llama_on_one_gpu_and_beyond_its_key_value_heads():
    shapes = {name: (op.shape["n"], op.shape["k"]) for name, op in ops(plan_of("Llama-3.1-8B")).items()}
    assert shapes == {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }  # fmt: skip
    assert ops(plan_of("Llama-3.1-8B", tp=16))["qkv"].shape["n"] == (2 + 2) * 128


def test_fp8_per_tensor_is_bmm_fp8_and_the_head_stays_bf16():
    planned = ops(plan_of("Llama-3.3-70B-FP8", tp=4))
    assert {name: op.op for name, op in planned.items()} == {
        "qkv": "bmm_fp8", "o": "bmm_fp8", "gate_up": "bmm_fp8", "down": "bmm_fp8", "lm_head": "mm_bf16",
    }  # fmt: skip
    assert planned["qkv"].dtypes == {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "bfloat16"}
    assert planned["qkv"].backends == ("cublas",)


def test_every_part_is_either_planned_or_has_a_reason():
    for model in bundled_names():
        everything = {n.partition("_")[0] if "experts_" in n else n for n in ops(plan_of(model, arch="cpu-x86_64"))}
        for arch in ("80", "90a", "100a", "120f"):
            plan = plan_of(model, arch=arch)
            assert everything <= {*ops(plan), *reasons(plan)}, (model, arch)


def test_an_empty_plan_is_an_error_with_the_reasons_and_what_to_do_instead():
    with pytest.raises(PlanRefused, match="nothing of DeepSeek-V3") as caught:
        plan_of("DeepSeek-V3", tp=8, ops=["experts"])
    assert any("timings are meaningless" in line for line in caught.value.details)
    assert "pipeline build DeepSeek-V3 --server vllm" in caught.value.hint


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_mm_bf16_takes_bfloat16_alone(tmp_path, dtype):
    with pytest.raises(PlanRefused) as caught:
        plan_of(config_of(tmp_path, "tiny", torch_dtype=dtype))
    assert any(dtype in line for line in caught.value.details)
    assert any("servers cast float32" in line for line in caught.value.details) is (dtype == "float32")


@pytest.mark.parametrize("version", [OLD, "0.7.2.post1", "0.7.4rc1", NEW])
def test_what_was_fixed_in_0_7_4(version):
    op = ops(plan_of("tiny", version=version))["qkv"]
    assert op.options == ({} if version == NEW else {"hits": "exact"})
    assert any("0.7.4" in note for note in op.notes) is (version != NEW)
    cudnn = {"version": version, "backends": {"mm_bf16": ["cudnn"]}}
    if version == NEW:
        assert ops(plan_of("tiny", **cudnn))["qkv"].backends == ("cudnn",)
    else:
        with pytest.raises(PlanRefused, match="cannot be found again"):
            plan_of("tiny", **cudnn)


def test_a_flashinfer_newer_than_was_read_is_planned_and_noted():
    for version, noted in ((OLD, False), (NEW, False), ("0.7.4.post1", True), ("0.10.0", True)):
        notes = [note for note in plan_of("tiny", version=version).notes if "the newest that was read" in note]
        assert [note.split(" is taken")[0] for note in notes] == [f"FlashInfer {version}"] * noted


def test_tinygemm_alone_is_not_exact_and_needs_its_multiple():
    planned = ops(plan_of("Mixtral-8x7B", backends={"mm_bf16": ["cublaslt", "tinygemm"]}))
    assert planned["router"].backends == ("cublaslt",)  # 8 experts are no multiple of 16
    assert planned["qkv"].backends == ("cublaslt", "tinygemm")
    alone = plan_of("Mixtral-8x7B", backends={"mm_bf16": ["tinygemm"]})
    assert "multiples of 16" in reasons(alone)["router"] and ops(alone)["qkv"].options == {}


def test_moe_layers_whose_keys_collide_are_left_out(tmp_path):
    path = config_of(tmp_path, "tiny-moe", **fp8(ignore=["lm_head", "model.layers.0.mlp.experts"]))
    old, new = plan_of(path), plan_of(path, version="0.6.18")
    assert not [op for op in old.ops if op.op == "cutlass_fused_moe"]
    for name in ("experts.unquantized", "experts.fp8_per_tensor"):
        assert "0.6.18 tells them apart" in reasons(old)[name]
    assert len([op for op in new.ops if op.op == "cutlass_fused_moe"]) == 2


@pytest.mark.parametrize(
    ("version", "left"), [(OLD, False), ("0.6.18", True), ("0.7.1", True), ("0.7.2rc1", True), ("0.7.2", False)]
)
def test_moe_layers_whose_keys_contain_the_rank_are_left_out(version, left):
    """Each rank would hold another entry although all have chosen alike."""
    for layout in ({"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}):
        plan = plan_of("Mixtral-8x7B", version=version, **layout)
        assert ("experts" not in ops(plan)) is left
        assert ("writes the rank" in reasons(plan).get("experts", "")) is left
    assert "experts" in ops(plan_of("Mixtral-8x7B", version=version))


# --- expert parallelism


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4]))
def test_every_expert_parallel_rank_has_tokens(ep, dp):
    tp = max(1, ep // dp)
    plan = plan_of("Qwen3-30B-A3B", tp=tp, dp=dp, ep=min(ep, tp * dp))
    op = ops(plan)["experts"]
    size, top_k = op.shape["ep"], op.shape["top_k"]
    for tokens in op.buckets:  # the k-th choice of token t goes to rank (t * top_k + k) modulo the number of ranks
        reached = [{pair // top_k for pair in range(rank, tokens * top_k, size)} for rank in range(size)]
        fewest = min(map(len, reached))
        assert fewest >= 1
        if size > 1 and tokens == op.buckets[0]:
            assert int(op.options["tokens_per_rank_min"]) == fewest
    assert size == 1 or op.options["routing"] == "round_robin"
    missing = set(ops(plan)["qkv"].buckets) - set(op.buckets)
    assert all(tokens * top_k < size for tokens in missing)
    assert bool(missing) == any("without tokens" in part.reason for part in plan.untuned)


# --- options


def test_ops_and_skip_ops_leave_reasons():
    plan = plan_of("Llama-3.3-70B-FP8", tp=4, ops=["qkv", "mm_bf16"])
    assert set(ops(plan)) == {"qkv", "lm_head"} and reasons(plan)["down"] == "not among --ops"
    plan = plan_of("Llama-3.3-70B-FP8", tp=4, skip_ops=["bf16_gemm"])
    assert "lm_head" not in ops(plan) and "--skip-ops" in reasons(plan)["lm_head"]
    assert plan.skip_ops == ("bf16_gemm",)
    one_of_two = plan_of("Mixtral-8x7B", tp=2, skip_ops=["trtllm::fused_moe::gemm1"])
    assert "experts" in ops(one_of_two)
    assert "experts" not in ops(plan_of("Mixtral-8x7B", tp=2, skip_ops=list(TUNED_AS["cutlass_fused_moe"])))


@pytest.mark.parametrize("model", bundled_names())
@pytest.mark.parametrize("arch", ["cpu-x86_64", "100a"])
def test_json_gives_the_same_plan_back_and_text_names_everything(model, arch):
    plan = plan_of(model, arch=arch, tp=2)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    text = describe(plan)
    assert plan.digest in text and all(note in text for note in plan.notes)
    assert all(op.name in text and all(note in text for note in op.notes) for op in plan.ops)
    assert all(part.name in text and part.reason in text for part in plan.untuned)


@given(st.sampled_from(bundled_names()), st.randoms(use_true_random=False), st.text(min_size=1, max_size=8))
def test_digest_covers_neither_names_nor_order(model, chance, word):
    plan = plan_of(model, tp=2, skip_ops=["fp4_gemm", "mxfp8_gemm"])
    shuffled = [replace(op, name=f"{word}{i}", layers=7, notes=(word,)) for i, op in enumerate(plan.ops)]
    chance.shuffle(shuffled)
    skipped = ("mxfp8_gemm", "fp4_gemm")
    other = replace(plan, model=word, seed=1, ops=tuple(shuffled), untuned=(), notes=(word,), skip_ops=skipped)
    assert other.digest == plan.digest


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": (1, 2)}, {"backends": ("cudnn",)}, {"options": {"x": "y"}}, {"ranks": (0,)}, {"op": "other"},
        {"dtypes": {"a": "float16"}}, {"shape": {"n": 1, "k": 1}},
    ],
)  # fmt: skip
def test_digest_covers_every_meaning(change):
    plan = plan_of("Mixtral-8x7B", tp=2)
    for i, op in enumerate(plan.ops):
        assert replace(plan, ops=(*plan.ops[:i], replace(op, **change), *plan.ops[i + 1 :])).digest != plan.digest
    for other in ({"round_up": False}, {"skip_ops": ("x",)}, {"layout": Layout(tp=4)}):
        assert replace(plan, **other).digest != plan.digest


# --- anything else a config.json may say is refused or planned, never a traceback

_values = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 300), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.integers(-1, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(st.sampled_from(["tiny", "tiny-moe", "DeepSeek-V3", "gpt-oss-120b", "Llama-3.3-70B-FP8"]), st.data())
def test_odd_configs_are_refused_or_planned(tmp_path_factory, base, data):
    config = dict(find_model(base).config)
    quantization = config.get("quantization_config")
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[name] = data.draw(_values)
    if isinstance(quantization, dict) and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(quantization)))
        config["quantization_config"] = {**quantization, name: data.draw(_values)}
    if data.draw(st.booleans()):
        config = {"model_type": data.draw(st.sampled_from(["gemma3", "qwen3_vl", "x"])), "text_config": config}
    path = write_config(tmp_path_factory.mktemp("odd"), config)
    try:
        plan = plan_of(path, arch=data.draw(st.sampled_from(["cpu-x86_64", "90a", "100a"])), tp=2)
    except PlanRefused:
        return
    assert plan.ops and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
