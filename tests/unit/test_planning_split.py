"""Dividing a model over ranks: the ranks' shares add up to the model, whatever the sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.plan import Layout
from pipeline.planning.facts import MOE, Facts, Mla, Moe
from pipeline.planning.parts import model_parts
from pipeline.planning.problems import PlanRefused, Problems
from pipeline.planning.quant import Quantization
from pipeline.planning.split import VOCAB_PADDING, Split, pad

sizes = st.integers(1, 12)
powers = st.sampled_from([1, 2, 4, 8])


@st.composite
def dense_models(draw):
    """A dense model and a TP size that fits it, key-value heads fewer or more than ranks."""
    tp, kv = draw(powers), draw(powers)
    kv_heads = draw(st.sampled_from([kv * max(1, tp // kv), kv])) if tp % kv == 0 else kv * tp
    heads = tp * kv_heads * draw(sizes)
    facts = Facts(
        name="m",
        family="llama",
        dtype="bfloat16",
        layers=draw(sizes),
        hidden=16 * draw(sizes),
        intermediate=tp * draw(sizes),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8 * draw(sizes),
        vocab=draw(st.integers(1, 5000)) * 8,
    )
    return facts, tp


def by_name(facts, layout):
    problems = Problems()
    parts = model_parts(facts, layout, Quantization(), problems)
    problems.check()
    return {part.name: part for part in parts}


@given(dense_models())
def test_dense_shares_add_up(drawn):
    facts, tp = drawn
    parts = by_name(facts, Layout(tp=tp))
    size, kv_copies = facts.head_dim, max(facts.kv_heads, tp)
    assert parts["qkv"].n * tp == (facts.heads + 2 * kv_copies) * size
    assert parts["qkv"].k == parts["gate_up"].k == parts["lm_head"].k == facts.hidden
    assert parts["o"].n == parts["down"].n == facts.hidden
    assert parts["o"].k * tp == facts.heads * size
    assert parts["gate_up"].n * tp == 2 * facts.intermediate
    assert parts["down"].k * tp == facts.intermediate
    assert parts["lm_head"].n * tp == pad(facts.vocab, VOCAB_PADDING) >= facts.vocab
    assert all(len(part.layers) == facts.layers for name, part in parts.items() if name != "lm_head")


@st.composite
def sparse_models(draw):
    """A model with latent attention and experts, and a layout that fits it."""
    tp, dp, ep = draw(powers), draw(powers), draw(powers)
    ep = ep if (tp * dp) % ep == 0 else 1
    moe_tp = tp * dp // ep
    layers = draw(st.integers(2, 12))
    first = draw(st.integers(0, layers - 1))
    inner = moe_tp * tp * draw(sizes)
    moe = Moe(
        layers=tuple(range(first, layers)),
        experts=ep * draw(sizes),
        top_k=1,
        intermediate=inner,
        shared=inner * draw(st.integers(0, 2)),
        keys=MOE["deepseek_v3"],
    )
    facts = Facts(
        name="m",
        family="deepseek_v3",
        dtype="bfloat16",
        layers=layers,
        hidden=16 * draw(sizes),
        intermediate=tp * draw(sizes),
        heads=tp * draw(sizes),
        kv_heads=1,
        head_dim=8,
        vocab=64 * draw(sizes),
        moe=moe,
        mla=Mla(q_rank=draw(st.sampled_from([0, 24])), kv_rank=16, nope=8, rope=4, value=8),
    )
    return facts, Layout(tp=tp, dp=dp, ep=ep)


@given(sparse_models())
def test_sparse_shares_add_up(drawn):
    facts, layout = drawn
    parts = by_name(facts, layout)
    shape = parts["experts"].moe
    assert shape.local_experts * layout.ep == shape.experts == facts.moe.experts
    assert shape.intermediate * shape.tp == facts.moe.intermediate
    assert shape.tp * shape.ep == layout.tp * layout.dp
    # the experts' weights over all ranks that share a layer are the model's
    assert (
        shape.local_experts * shape.intermediate * layout.tp * layout.dp == facts.moe.experts * facts.moe.intermediate
    )
    assert parts["router"].n == facts.moe.experts
    assert len(parts["experts"].layers) + len(parts["gate_up"].layers if "gate_up" in parts else ()) == facts.layers
    mla = facts.mla
    if mla.q_rank:
        assert parts["fused_qkv_a"].n == mla.q_rank + mla.kv_rank + mla.rope
        assert parts["q_b"].n * layout.tp == facts.heads * (mla.nope + mla.rope)
    else:
        assert parts["q"].n * layout.tp == facts.heads * (mla.nope + mla.rope)
        assert parts["kv_a"].n == mla.kv_rank + mla.rope
    assert parts["kv_b"].n * layout.tp == facts.heads * (mla.nope + mla.value)
    assert parts["o"].k * layout.tp == facts.heads * mla.value
    if facts.moe.shared:
        whole = min(layout.tp, layout.dp, layout.ep) > 1
        assert parts["shared_down"].k * (1 if whole else layout.tp) == facts.moe.shared


@given(dense_models(), st.integers(1, 6), powers)
def test_pipeline_stages_hold_every_layer_once(drawn, pp, dp):
    facts, tp = drawn
    layout = Layout(tp=tp, pp=pp, dp=dp)
    split = Split(facts, layout)
    stages = split.stages()
    if facts.layers < pp:
        assert split.misfits
        return
    assert [i for stage in stages for i in stage] == list(range(facts.layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert len(stages[-1]) == min(map(len, stages))
    every = [rank for stage in range(pp) for rank in split.ranks(frozenset({stage}))]
    assert sorted(every) == (list(range(layout.world)) if pp > 1 else [])
    if pp > 1:
        assert by_name(facts, layout)["lm_head"].ranks == split.ranks(frozenset({pp - 1}))


@pytest.mark.parametrize(
    ("layers", "pp", "counts"), [(61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (36, 8, [4, 4, 4, 5, 5, 5, 5, 4])]
)
def test_uneven_stages(layers, pp, counts):
    facts = Facts("m", "llama", "bfloat16", layers, 64, 64, 8, 8, 8, 64)
    assert [len(stage) for stage in Split(facts, Layout(pp=pp)).stages()] == counts


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 33),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_what_cannot_be_divided_is_refused_and_the_remedy_holds(heads, kv_heads, inner, tp, pp, layers):
    facts = Facts("m", "llama", "bfloat16", layers, 64, inner, heads, kv_heads, 8, 6400)
    layout = Layout(tp=tp, pp=pp)
    try:
        parts = by_name(facts, layout)
    except PlanRefused as refused:
        assert f"TP={tp}" in refused.message or f"PP={pp}" in refused.message
        name, may_be, named = refused.hint.partition(" may be ")
        if may_be:
            for fit in named.split(", "):
                by_name(facts, replace(layout, **{name.lower(): int(fit)}))
    else:
        assert heads % tp == inner % tp == 6400 % tp == 0
        assert kv_heads % tp == 0 or tp % kv_heads == 0
        assert pp <= layers
        assert parts


def test_mxfp4_experts_are_dealt_out_in_whole_blocks():
    moe = Moe(layers=(0,), experts=128, top_k=4, intermediate=2880, keys=MOE["gpt_oss"])
    facts = Facts("m", "gpt_oss", "bfloat16", 1, 2880, 2880, 64, 8, 64, 201088, moe=moe)
    assert [Split(facts, Layout(tp=tp)).expert_inner(mxfp4=True) for tp in (1, 2, 4, 8)] == [2880, 1440, 736, 384]
