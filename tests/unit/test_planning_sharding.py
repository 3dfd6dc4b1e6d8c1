"""Dividing a model over ranks: the ranks' shares add up to the model, whatever the sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.plan import Layout
from pipeline.planning.model_config import MOE, ModelConfig, Moe
from pipeline.planning.problems import PlanRefused, Problems
from pipeline.planning.quantization import Quantization
from pipeline.planning.sharding import VOCAB_PADDING, Shards, model_parts, pad

sizes = st.integers(1, 12)
powers = st.sampled_from([1, 2, 4, 8])


def dense(layers=1, hidden=64, intermediate=64, heads=8, kv_heads=8, head_dim=8, vocab=64, **more):
    family = more.pop("family", "llama")
    return ModelConfig("m", family, "bfloat16", layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, **more)


@st.composite
def dense_models(draw):
    """A dense model and a TP size that fits it, key-value heads fewer or more than ranks."""
    tp, kv = draw(powers), draw(powers)
    kv_heads = draw(st.sampled_from([kv * max(1, tp // kv), kv])) if tp % kv == 0 else kv * tp
    model = dense(
        draw(sizes), 16 * draw(sizes), tp * draw(sizes), tp * kv_heads * draw(sizes), kv_heads, 8 * draw(sizes),
        draw(st.integers(1, 5000)) * 8,
    )  # fmt: skip
    return model, tp


def by_name(model, layout):
    problems = Problems()
    parts = model_parts(model, layout, Quantization(), problems)
    problems.check()
    return {part.name: part for part in parts}


@given(dense_models())
def test_dense_shares_add_up(drawn):
    model, tp = drawn
    parts = by_name(model, Layout(tp=tp))
    assert parts["qkv"].n * tp == (model.heads + 2 * max(model.kv_heads, tp)) * model.head_dim
    assert parts["qkv"].k == parts["gate_up"].k == parts["lm_head"].k == model.hidden
    assert parts["o"].n == parts["down"].n == model.hidden
    assert parts["o"].k * tp == model.heads * model.head_dim
    assert parts["gate_up"].n * tp == 2 * parts["down"].k * tp == 2 * model.intermediate
    assert parts["lm_head"].n * tp == pad(model.vocab, VOCAB_PADDING) >= model.vocab
    assert all(len(part.layers) == model.layers for name, part in parts.items() if name != "lm_head")


@given(dense_models(), st.integers(1, 6), powers)
def test_pipeline_stages_hold_every_layer_once(drawn, pp, dp):
    model, tp = drawn
    layout = Layout(tp=tp, pp=pp, dp=dp)
    shards = Shards(model, layout)
    stages = shards.stages()
    if model.layers < pp:
        assert shards.errors
        return
    assert [i for stage in stages for i in stage] == list(range(model.layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1 and len(stages[-1]) == min(map(len, stages))
    every = [rank for stage in range(pp) for rank in shards.ranks(frozenset({stage}))]
    assert sorted(every) == (list(range(layout.world)) if pp > 1 else [])
    if pp > 1:
        assert by_name(model, layout)["lm_head"].ranks == shards.ranks(frozenset({pp - 1}))


@pytest.mark.parametrize(
    ("layers", "pp", "counts"), [(61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (36, 8, [4, 4, 4, 5, 5, 5, 5, 4])]
)
def test_uneven_stages(layers, pp, counts):
    assert [len(stage) for stage in Shards(dense(layers), Layout(pp=pp)).stages()] == counts


@given(*(st.integers(1, most) for most in (40, 40, 200, 33, 5, 9)))
def test_what_cannot_be_divided_is_refused_and_the_remedy_holds(heads, kv_heads, inner, tp, pp, layers):
    model, layout = dense(layers, 64, inner, heads, kv_heads, 8, 6400), Layout(tp=tp, pp=pp)
    try:
        assert by_name(model, layout)
    except PlanRefused as refused:
        assert f"TP={tp}" in refused.message or f"PP={pp}" in refused.message
        name, may_be, named = refused.hint.partition(" may be ")
        for fit in named.split(", ") if may_be else ():
            by_name(model, replace(layout, **{name.lower(): int(fit)}))
    else:
        assert heads % tp == inner % tp == 6400 % tp == 0 and pp <= layers
        assert kv_heads % tp == 0 or tp % kv_heads == 0


def test_mxfp4_experts_are_divided_in_whole_blocks():
    moe = Moe(layers=(0,), experts=128, top_k=4, intermediate=2880, keys=MOE["gpt_oss"])
    model = dense(1, 2880, 2880, 64, 8, 64, 201088, family="gpt_oss", moe=moe)
    shapes = [Shards(model, Layout(tp=tp)).experts(moe, mxfp4=True) for tp in (1, 2, 4, 8)]
    assert [shape.intermediate for shape in shapes] == [2880, 1440, 736, 384]
