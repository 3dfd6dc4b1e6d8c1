"""Families beside the bundled ones: shapes per rank, worked out by hand from each model's published config.json.

Layouts of the layers: vllm-project/vllm, vllm/model_executor/models/<family>.py, all of whose attention is
QKVParallelLinear (or, latent, deepseek_v2.py) and whose dense layers are MergedColumnParallelLinear.
"""

import json

import pytest
from planning_samples import ops, plan_of, reasons

from pipeline.planning.problems import PlanRefused

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GENERAL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def general(family, *sizes, vocab, **more):
    return {"model_type": family, **dict(zip(GENERAL, sizes, strict=True)), "vocab_size": vocab, **more}


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {
    "Qwen2.5-7B": general("qwen2", 3584, 18944, 28, 28, 4, vocab=152064),
    "Mistral-Nemo": general("mistral", 5120, 14336, 40, 32, 8, vocab=131072, head_dim=128),
    "GLM-4-9B-0414": general("glm4", 4096, 13696, 40, 32, 2, vocab=151552, head_dim=128),
    "gemma-2-9b": general("gemma2", 3584, 14336, 42, 16, 8, vocab=256000, head_dim=256, tie_word_embeddings=True),
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
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"torch_dtype": "bfloat16", **MODELS[name], **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("name", "layout", "shapes"),
    [
        ("Qwen2.5-7B", {"tp": 4}, {
            "qkv": (1152, 3584), "o": (3584, 896), "gate_up": (9472, 3584), "down": (3584, 4736),
            "lm_head": (38016, 3584),
        }),
        ("Mistral-Nemo", {"tp": 2}, {
            "qkv": (3072, 5120), "o": (5120, 2048), "gate_up": (14336, 5120), "lm_head": (65536, 5120),
        }),
        ("GLM-4-9B-0414", {"tp": 4}, {"qkv": (1280, 4096), "o": (4096, 1024), "gate_up": (6848, 4096)}),
        ("gemma-2-9b", {"tp": 2}, {
            "qkv": (4096, 3584), "o": (3584, 2048), "gate_up": (14336, 3584), "down": (3584, 7168),
            "lm_head": (128000, 3584),
        }),
        ("phi-4", {"tp": 2}, {"qkv": (3840, 5120), "o": (5120, 2560), "gate_up": (17920, 5120)}),
        ("Qwen1.5-MoE-A2.7B", {"tp": 4}, {
            "qkv": (1536, 2048), "o": (2048, 512), "router": (60, 2048), "shared_gate_up": (2816, 2048),
            "shared_down": (2048, 1408), "lm_head": (37984, 2048),
        }),
        ("GLM-4.5-Air", {"tp": 4}, {
            "qkv": (3584, 4096), "o": (4096, 3072), "gate_up": (5472, 4096), "down": (4096, 2736),
            "shared_gate_up": (704, 4096), "shared_down": (4096, 352), "lm_head": (37888, 4096),
        }),
        ("MiniMax-M2", {"tp": 4}, {"qkv": (2048, 3072), "o": (3072, 1536), "lm_head": (50016, 3072)}),
        ("DeepSeek-V2-Lite", {"tp": 2}, {
            "q": (1536, 2048), "kv_a": (576, 2048), "kv_b": (2048, 512), "o": (2048, 1024),
            "gate_up": (10944, 2048), "shared_gate_up": (2816, 2048), "shared_down": (2048, 1408),
            "router": (64, 2048), "lm_head": (51200, 2048),
        }),
        # each rank has other tokens in the shared expert: vllm/config/parallel.py, use_sequence_parallel_moe
        ("DeepSeek-V2-Lite", {"tp": 2, "dp": 2, "ep": 4}, {
            "q": (1536, 2048), "gate_up": (10944, 2048), "shared_gate_up": (5632, 2048), "shared_down": (2048, 2816),
        }),
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
        ("Qwen1.5-MoE-A2.7B", {"tp": 4}, (60, 60, 2048, 352, 4)),
        ("GLM-4.5-Air", {"tp": 4}, (128, 128, 4096, 352, 8)),
        ("DeepSeek-V2-Lite", {"tp": 2}, (64, 64, 2048, 704, 6)),
        ("Kimi-K2", {"tp": 8, "ep": 8}, (384, 48, 7168, 2048, 8)),
    ],
)
def test_experts_per_rank(tmp_path, name, layout, experts):
    op = ops(plan_of(config(tmp_path, name), **layout))["experts"]
    assert op.op == "cutlass_fused_moe"
    assert tuple(op.shape[n] for n in ("experts", "local_experts", "hidden", "intermediate", "top_k")) == experts


def test_layers_of_each_kind(tmp_path):
    planned = ops(plan_of(config(tmp_path, "GLM-4.5-Air")))
    assert (planned["gate_up"].layers, planned["experts"].layers) == (1, 45)
    assert "float32 weights" in reasons(plan_of(config(tmp_path, "GLM-4.5-Air")))["router"]
    assert "gate_up" not in ops(plan_of(config(tmp_path, "Qwen1.5-MoE-A2.7B")))
    stepped = ops(plan_of(config(tmp_path, "Qwen1.5-MoE-A2.7B", decoder_sparse_step=2, intermediate_size=4096)))
    assert (stepped["gate_up"].layers, stepped["experts"].layers) == (12, 12)


def test_what_a_family_leaves_out(tmp_path):
    assert "one row" in reasons(plan_of(config(tmp_path, "Qwen1.5-MoE-A2.7B")))["shared_expert_gate"]
    assert "mtp" in reasons(plan_of(config(tmp_path, "GLM-4.5-Air")))
    minimax = reasons(plan_of(config(tmp_path, "MiniMax-M2"), arch="100a", tp=4))
    assert "minimax_m2 routes tokens" in minimax["experts"]
    assert "float32 weights" in minimax["router"]
    assert "192 channels" in reasons(plan_of(config(tmp_path, "MiniMax-M2"), arch="100a", tp=8))["experts"]


def test_gemma_means_256_channels_per_head_where_it_says_nothing(tmp_path):
    path = config(tmp_path, "gemma-2-9b", head_dim=None)
    assert ops(plan_of(path))["qkv"].shape == {"n": (16 + 2 * 8) * 256, "k": 3584}


@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [("Qwen2.5-7B", 8, "28 attention heads"), ("phi-4", 4, "10 key-value heads"), ("phi-4", 16, "40 attention heads")],
)
def test_what_does_not_divide(tmp_path, name, tp, said):
    with pytest.raises(PlanRefused, match=said):
        plan_of(config(tmp_path, name), tp=tp)


@pytest.mark.parametrize(
    "family", ["llama4", "llama4_text", "qwen3_next", "mamba2", "jamba", "nemotron_h", "gemma3n_text", "deepseek_v32"]
)
def test_other_layers_would_be_a_guess(tmp_path, family):
    with pytest.raises(PlanRefused, match=f"model_type '{family}' is not one that can be planned") as caught:
        plan_of(config(tmp_path, "Qwen2.5-7B", model_type=family))
    assert "glm4_moe" in caught.value.hint
