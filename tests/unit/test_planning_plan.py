"""Plans: which ops stand for a model on which device, what is left out and why, and the digest."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_samples import NEW, OLD, config_of, fp8, ops, plan_of, reasons

from pipeline.contract.plan import MOST_RANKS, Layout, Plan, PlanInvalid
from pipeline.flashinfer.ops import TUNED_AS
from pipeline.planning.buckets import default_buckets, flashinfer_buckets, powers_of_two
from pipeline.planning.find import bundled_names, find_model
from pipeline.planning.problems import PlanRefused
from pipeline.planning.show import describe

# --- shapes and ops


def test_shapes_of_llama_on_one_gpu():
    shapes = {name: (op.shape["n"], op.shape["k"]) for name, op in ops(plan_of("Llama-3.1-8B")).items()}
    assert shapes == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }


def test_deepseek_on_eight_ranks():
    planned = ops(plan_of("DeepSeek-V3", arch="cpu-x86_64", tp=8))
    shapes = {name: (op.shape["n"], op.shape["k"]) for name, op in planned.items()}
    assert shapes["fused_qkv_a"] == (2112, 7168)
    assert shapes["q_b"] == (3072, 1536)
    assert shapes["kv_b"] == (4096, 512)
    assert shapes["o"] == (7168, 2048)
    assert shapes["gate_up"] == (4608, 7168)
    assert shapes["router"] == (256, 7168)
    assert shapes["lm_head"] == (16160, 7168)


def test_key_value_heads_are_replicated_beyond_their_number():
    assert ops(plan_of("Llama-3.1-8B", tp=16))["qkv"].shape["n"] == (2 + 2) * 128


def test_equal_shapes_are_one_op():
    plan = plan_of("tiny", arch="cpu-x86_64")
    merged = next(op for op in plan.ops if "+" in op.name)
    assert merged.name == "gate_up+lm_head"
    assert merged.layers == 3
    assert len({json.dumps(op.meaning(), sort_keys=True) for op in plan.ops}) == len(plan.ops)


def test_pipeline_parts_know_their_ranks():
    plan = plan_of("Qwen3-8B", tp=2, pp=2)
    assert ops(plan)["lm_head"].ranks == (2, 3)
    assert ops(plan)["qkv"].ranks == ()
    assert plan.layout.world == 4


def test_fp8_per_tensor_is_bmm_fp8_and_the_head_stays_bf16():
    planned = ops(plan_of("Llama-3.3-70B-FP8", tp=4))
    assert {name: op.op for name, op in planned.items()} == {
        "qkv": "bmm_fp8", "o": "bmm_fp8", "gate_up": "bmm_fp8", "down": "bmm_fp8", "lm_head": "mm_bf16",
    }  # fmt: skip
    assert planned["qkv"].dtypes == {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "bfloat16"}
    assert planned["qkv"].backends == ("cublas",)


def test_names_are_unique_where_some_layers_are_quantized(tmp_path):
    path = config_of(tmp_path, "Llama-3.1-8B", **fp8(ignore=["lm_head", "model.layers.0.mlp"]))
    names = [op.name for op in plan_of(path).ops]
    assert len(names) == len(set(names))
    assert {"down.unquantized", "down.fp8_per_tensor"} <= set(names)
    assert ops(plan_of(path))["down.unquantized"].layers == 1


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("100a", "trtllm_fp8_block_scale_moe"), ("103a", "trtllm_fp8_block_scale_moe"), ("120f", None), ("90a", None)],
)
def test_block_scaled_experts(arch, expected):
    plan = plan_of("DeepSeek-V3", arch=arch, tp=8, ep=8)
    if expected:
        op = ops(plan)["experts"]
        assert op.op == expected
        assert op.options["routing_method"] == "deepseek_v3"
        assert (op.options["n_group"], op.options["topk_group"]) == ("8", "4")
        assert (op.shape["local_experts"], op.shape["intermediate"]) == (32, 2048)
        assert any("unverified" in note for note in op.notes)
    else:
        assert "experts" in reasons(plan)


@pytest.mark.parametrize(("algorithm", "adapter"), [("NVFP4", "mm_fp4"), ("MXFP8", "mm_mxfp8")])
def test_small_formats_need_blackwell(tmp_path, algorithm, adapter):
    path = config_of(
        tmp_path, "Llama-3.1-8B", quantization_config={"quant_method": "modelopt", "quant_algo": algorithm}
    )
    new = ops(plan_of(path, arch="100a"))["qkv"]
    assert new.op == adapter
    assert new.backends
    assert any("unverified" in note for note in new.notes)
    assert "compute capability 10.0" in reasons(plan_of(path))["qkv"]


# --- what is left out, and why


def test_dense_block_fp8_is_left_out_with_the_reason():
    why = reasons(plan_of("Qwen3-30B-A3B-FP8"))
    assert "AutoTuner" in why["qkv"]
    assert "noise" in why["experts"]


def test_every_part_is_either_planned_or_has_a_reason():
    for model in bundled_names():
        everything = set(ops(plan_of(model, arch="cpu-x86_64")))
        for arch in ("80", "89", "90a", "100a", "120f"):
            plan = plan_of(model, arch=arch)
            accounted = {*ops(plan), *reasons(plan)}
            assert {n.removesuffix("_gate_up").removesuffix("_down") if "experts" in n else n for n in everything} <= {
                *accounted,
                "shared_experts",
            }, (model, arch)


def test_the_plan_says_which_servers_run_its_flashinfer():
    for arch in ("90a", "100a"):
        notes = plan_of("Llama-3.3-70B-FP8", arch=arch, version="0.7.2.post1").notes
        assert any("here 0.7.2.post1" in note and "vLLM 0.33.0 pins 0.7.2.post1" in note for note in notes)
    assert not any(" pins " in note for note in plan_of("Llama-3.1-8B").notes)


def test_an_empty_plan_is_an_error_with_the_reasons():
    with pytest.raises(PlanRefused, match="nothing of DeepSeek-V3") as caught:
        plan_of("DeepSeek-V3", tp=8, ops=["experts"])
    assert any("noise" in line for line in caught.value.details)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_mm_bf16_takes_bfloat16_alone(tmp_path, dtype):
    with pytest.raises(PlanRefused) as caught:
        plan_of(config_of(tmp_path, "tiny", torch_dtype=dtype))
    assert any(dtype in line for line in caught.value.details)
    assert any("servers cast float32" in line for line in caught.value.details) is (dtype == "float32")


def test_other_towers_are_named(tmp_path):
    text = dict(find_model("tiny").config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "x_vl", "text_config": text, "vision_config": {"depth": 1}}))
    plan = plan_of(str(path))
    assert "vision" in reasons(plan)
    assert ops(plan)["qkv"].shape == ops(plan_of("tiny"))["qkv"].shape


def test_large_models_on_a_processor_are_warned_of():
    assert any("large for a processor" in note for note in plan_of("Llama-3.1-8B", arch="cpu-x86_64").notes)
    assert not any("large" in note for note in plan_of("tiny", arch="cpu-x86_64").notes)


# --- versions of FlashInfer


def test_cublaslt_is_exact_until_it_was_mended():
    old, new = ops(plan_of("tiny"))["qkv"], ops(plan_of("tiny", version=NEW))["qkv"]
    assert old.options == {"hits": "exact"}
    assert any("0.7.4" in note for note in old.notes)
    assert new.options == {}
    assert ops(plan_of("tiny", version="0.7.2.post1"))["qkv"].options == {"hits": "exact"}


def test_a_flashinfer_newer_than_was_read_is_planned_and_remarked_on():
    for version, told in ((OLD, False), (NEW, False), ("0.7.4.post1", True), ("0.10.0", True)):
        notes = [note for note in plan_of("tiny", version=version).notes if "the newest that was read" in note]
        assert [note.split(" is taken")[0] for note in notes] == [f"FlashInfer {version}"] * told


def test_tinygemm_alone_is_not_exact_and_needs_its_multiple():
    planned = ops(plan_of("Mixtral-8x7B", backends={"mm_bf16": ["cublaslt", "tinygemm"]}))
    assert planned["router"].backends == ("cublaslt",)  # 8 experts are no multiple of 16
    assert planned["qkv"].backends == ("cublaslt", "tinygemm")
    alone = plan_of("Mixtral-8x7B", backends={"mm_bf16": ["tinygemm"]})
    assert "multiples of 16" in reasons(alone)["router"]
    assert ops(alone)["qkv"].options == {}


def test_cudnn_bf16_is_refused_until_it_was_mended():
    with pytest.raises(PlanRefused, match="cannot be found again"):
        plan_of("tiny", backends={"mm_bf16": ["cudnn"]})
    assert ops(plan_of("tiny", version=NEW, backends={"mm_bf16": ["cudnn"]}))["qkv"].backends == ("cudnn",)


def test_moe_layers_whose_keys_collide_are_refused(tmp_path):
    path = config_of(tmp_path, "tiny-moe", **fp8(ignore=["lm_head", "model.layers.0.mlp.experts"]))
    old = plan_of(path)
    assert not [op for op in old.ops if op.op == "cutlass_fused_moe"]
    for name in ("experts.unquantized", "experts.fp8_per_tensor"):
        assert "0.6.18 tells them apart" in reasons(old)[name]
    new = plan_of(path, version="0.6.18")
    assert len([op for op in new.ops if op.op == "cutlass_fused_moe"]) == 2


@pytest.mark.parametrize(("version", "left"), [(OLD, False), ("0.6.18", True), ("0.7.1", True), ("0.7.2", False)])
def test_moe_layers_whose_keys_hold_the_rank_are_left_out(version, left):
    """Ranks that have chosen alike would each hold another entry: with any strategy, the tuning would end with 6."""
    for layout in ({"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}):
        plan = plan_of("Mixtral-8x7B", version=version, **layout)
        assert ("experts" not in ops(plan)) is left
        if left:
            assert "writes the rank" in reasons(plan)["experts"] and "fixed in 0.7.2" in reasons(plan)["experts"]
    assert "experts" in ops(plan_of("Mixtral-8x7B", version=version))


# --- expert parallelism


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4]))
def test_every_expert_parallel_rank_has_tokens(ep, dp):
    tp = max(1, ep // dp)
    plan = plan_of("Qwen3-30B-A3B", tp=tp, dp=dp, ep=min(ep, tp * dp))
    op = ops(plan)["experts"]
    size, top_k = op.shape["ep"], op.shape["top_k"]
    for tokens in op.buckets:
        # the k-th choice of token t goes to rank (t * top_k + k) modulo the number of ranks
        reached = [set() for _ in range(size)]
        for pair in range(tokens * top_k):
            reached[pair % size].add(pair // top_k)
        fewest = min(len(tokens_there) for tokens_there in reached)
        assert fewest >= 1
        if size > 1 and tokens == op.buckets[0]:
            assert int(op.options["tokens_per_rank_min"]) == fewest
    if size > 1:
        assert op.options["routing"] == "round_robin"
    missing = set(ops(plan)["qkv"].buckets) - set(op.buckets)
    assert all(tokens * top_k < size for tokens in missing)
    assert bool(missing) == any("without tokens" in part.reason for part in plan.untuned)


# --- options


def test_ops_and_skip_ops_leave_reasons():
    plan = plan_of("Llama-3.3-70B-FP8", tp=4, ops=["qkv", "mm_bf16"])
    assert set(ops(plan)) == {"qkv", "lm_head"}
    assert reasons(plan)["down"] == "not among --ops"
    plan = plan_of("Llama-3.3-70B-FP8", tp=4, skip_ops=["bf16_gemm"])
    assert "lm_head" not in ops(plan)
    assert plan.skip_ops == ("bf16_gemm",)
    assert "--skip-ops" in reasons(plan)["lm_head"]


def test_half_of_a_moe_op_may_be_skipped():
    plan = plan_of("Mixtral-8x7B", tp=2, skip_ops=["trtllm::fused_moe::gemm1"])
    assert "experts" in ops(plan)
    plan = plan_of("Mixtral-8x7B", tp=2, skip_ops=list(TUNED_AS["cutlass_fused_moe"]))
    assert "experts" not in ops(plan)


def test_own_buckets_are_sorted_and_said():
    plan = plan_of("tiny", buckets=[64, 1, 64, 8], round_up=True)
    assert {op.buckets for op in plan.ops} == {(1, 8, 64)}
    assert any("tuning_buckets" in note and "round_up=True" in note for note in plan.notes)


def test_flashinfers_buckets():
    assert flashinfer_buckets(8192) == (
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 8192,
    )  # fmt: skip


@given(st.integers(1, 1 << 20))
def test_buckets_end_with_the_first_that_holds_the_largest_batch(largest):
    for found in (powers_of_two(largest), flashinfer_buckets(largest)):
        assert found[0] == 1
        assert list(found) == sorted(set(found))
        assert found[-1] >= largest
        assert all(bucket < largest for bucket in found[:-1])


def test_default_buckets():
    assert default_buckets("cpu", None) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert default_buckets("cuda", None)[-1] == 8192
    assert default_buckets("cuda", 100) == (1, 2, 4, 8, 16, 32, 64, 128)


# --- the digest


@pytest.mark.parametrize("model", bundled_names())
@pytest.mark.parametrize("arch", ["cpu-x86_64", "90a", "100a"])
def test_json_gives_the_same_plan_back(model, arch):
    plan = plan_of(model, arch=arch, tp=2)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("layout", "tp"), 0),
        (("layout", "dp"), -2),
        (("layout", "pp"), MOST_RANKS),  # with TP=2
        (("layout", "ep"), MOST_RANKS + 1),
        (("ops", 0, "shape"), {"n": None, "k": 64}),
        (("ops", 0, "shape"), {"n": 0, "k": 64}),
        (("ops", 0, "dtypes"), {"a": 8}),
        (("ops", 0, "ranks"), [2]),
        (("ops", 0, "ranks"), "0"),
        (("ops", 0, "layers"), None),
        (("ops", 0, "backends"), None),
        (("ops", 0, "options"), ["a"]),
        (("ops", 0, "notes"), 1),
        (("skip_ops",), None),
        (("untuned",), ["a"]),
        (("notes",), True),
        (("seed",), 1 << 64),
    ],
)
def test_a_plan_edited_by_hand_is_refused_where_it_is_read(place, value):
    edited = json.loads(json.dumps({**plan_of("tiny", arch="cpu-x86_64", tp=2).to_json(), "digest": None}))
    assert Plan.from_json(edited)
    *above, last = place
    at = edited
    for step in above:
        at = at[step]
    at[last] = value
    with pytest.raises(PlanInvalid, match=rf"\$\.{place[0]}"):
        Plan.from_json(edited)


def test_more_ranks_than_anyone_has_are_refused():
    with pytest.raises(PlanRefused, match=f"TP, PP and DP make {2 * MOST_RANKS} ranks"):
        plan_of("tiny", arch="cpu-x86_64", tp=2, dp=MOST_RANKS)


@given(st.sampled_from(bundled_names()), st.randoms(use_true_random=False), st.text(min_size=1, max_size=8))
def test_digest_knows_neither_names_nor_order(model, chance, word):
    plan = plan_of(model, tp=2)
    shuffled = [replace(op, name=f"{word}{i}", layers=7, notes=(word,)) for i, op in enumerate(plan.ops)]
    chance.shuffle(shuffled)
    other = replace(plan, model=word, seed=1, ops=tuple(shuffled), untuned=(), notes=(word,))
    assert other.digest == plan.digest


@given(st.data())
def test_digest_knows_every_meaning(data):
    plan = plan_of("Mixtral-8x7B", tp=2)
    i = data.draw(st.integers(0, len(plan.ops) - 1))
    op = plan.ops[i]
    name = data.draw(st.sampled_from(sorted(op.shape)))
    changed = data.draw(
        st.sampled_from(
            [
                replace(op, shape={**op.shape, name: op.shape[name] + 1}),
                replace(op, buckets=op.buckets[:-1]),
                replace(op, dtypes={**op.dtypes, "out": "float16"}),
                replace(op, backends=("cudnn",)),
                replace(op, options={"x": "y"}),
                replace(op, ranks=(0,)),
                replace(op, op="other"),
            ]
        )
    )
    assert replace(plan, ops=(*plan.ops[:i], changed, *plan.ops[i + 1 :])).digest != plan.digest
    assert replace(plan, round_up=False).digest != plan.digest
    assert replace(plan, skip_ops=("x",)).digest != plan.digest
    assert replace(plan, layout=Layout(tp=4)).digest != plan.digest


def test_planning_twice_is_the_same():
    assert plan_of("DeepSeek-V3", tp=8, ep=8) == plan_of("deepseek-v3", tp=8, ep=8)


@pytest.mark.parametrize("model", bundled_names())
def test_text_names_every_op_reason_and_the_digest(model):
    plan = plan_of(model, arch="100a", tp=2)
    text = describe(plan)
    assert plan.digest in text
    assert all(op.name in text for op in plan.ops)
    assert all(part.name in text and part.reason in text for part in plan.untuned)
    assert all(note in text for note in plan.notes)


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
    path = tmp_path_factory.mktemp("odd") / "config.json"
    path.write_text(json.dumps(config))
    try:
        plan = plan_of(str(path), arch=data.draw(st.sampled_from(["cpu-x86_64", "90a", "100a"])), tp=2)
    except PlanRefused:
        return
    assert plan.ops
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("name", ["hidden_size", "model_type", "torch_dtype", "vocab_size", "moe_layer_freq"])
def test_a_long_value_is_told_in_short(tmp_path, name):
    with pytest.raises(PlanRefused) as caught:
        plan_of(config_of(tmp_path, "DeepSeek-V3", **{name: "x" * 10_000}))
    lines = [str(caught.value), *caught.value.details]
    assert any(name in line for line in lines)
    assert max(map(len, lines)) < 400


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "jamba", "hidden_size": 4096}, "model_type 'jamba' is not one that can be planned"),
        ({"hidden_size": 4096}, "model_type is missing"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "model_type 'gemma3n_text' is not one"),
        (dict(find_model("tiny").config) | {"num_key_value_heads": 64}, "4 attention heads do not share 64 key-value"),
        (dict(find_model("tiny").config) | {"num_key_value_heads": 3}, "4 attention heads do not share 3 key-value"),
        (dict(find_model("tiny").config) | {"quantization_config": {"load_in_4bit": True}}, "has no quant_method"),
    ],
)
def test_one_thing_wrong_is_one_line(tmp_path, config, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(PlanRefused, match=message) as caught:
        plan_of(str(path))
    assert not caught.value.details


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)


@pytest.mark.parametrize("value", [0, -4, 2.5])
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Llama-3.1-8B", _SIZES),
        ("Mixtral-8x7B", (*_SIZES, "num_local_experts", "num_experts_per_tok")),
        ("Qwen3-30B-A3B", (*_SIZES, "num_experts", "moe_intermediate_size", "decoder_sparse_step")),
        ("DeepSeek-V3", (*_SIZES, "n_routed_experts", "q_lora_rank", "v_head_dim", "moe_layer_freq")),
    ],
)
def test_a_size_that_is_none_is_one_line(tmp_path, model, names, value):
    for name in names:
        with pytest.raises(PlanRefused, match=f"config.json: {name} is {value}, not a whole number from 1") as caught:
            plan_of(config_of(tmp_path, model, **{name: value}))
        assert not caught.value.details, name


def test_seeded_shuffle_of_options_changes_nothing():
    names = ["bf16_gemm", "fp8_gemm", "fp4_gemm"]
    digests = set()
    for seed in range(4):
        shuffled = names[:]
        random.Random(seed).shuffle(shuffled)
        digests.add(plan_of("Mixtral-8x7B", tp=2, skip_ops=shuffled).digest)
    assert len(digests) == 1


def test_flashinfers_own_buckets_round_up_as_flashinfer_does() -> None:
    assert plan_of("Llama-3.1-8B", arch="90a").round_up
    assert not plan_of("Llama-3.1-8B", arch="90a", buckets=[1, 8]).round_up
    assert not plan_of("tiny", arch="cpu-x86_64").round_up
