"""Keys that an engine made: held against the engine's rule and their manifest, explained, and refused when damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import cache_samples as samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cache.enginegroups import engine_groups, explain_group
from pipeline.cache.environment import Environment
from pipeline.cache.explain import explain_tree
from pipeline.cache.pick import keys_below, read_baked
from pipeline.cache.store import check_root
from pipeline.cache.tree import walk
from pipeline.contract.errors import CacheRefused
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import Plan, PlanInvalid
from pipeline.image.caches import collect
from pipeline.planning.engines import EngineArgumentsWrong, engine_start

H200 = "NVIDIA H200"


def findings(root):
    return [str(finding) for finding in check_root(root)[1]]


@pytest.mark.parametrize("ranks", [False, True])
def test_a_sound_key_of_an_engine(tmp_path, ranks):
    samples.write_engine(tmp_path, ranks=ranks)
    assert findings(tmp_path) == []
    (one,) = collect([tmp_path])
    assert one.manifest.plan.engine == samples.RUN and one.manifest.entries_per_op() == {"cpu_gemm": 3}
    for gpu, verdict in ((H200, "ok"), ("NVIDIA H100", "refused")):
        found = explain_tree(walk(tmp_path), Environment({**samples.H200, "gpu": gpu}), baked=True)
        assert found.verdict == verdict and "vllm 0.28.0 made it" in found.answers[0].notes[0]


def manifest_change(path, change):
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    change(manifest)
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))


def rewritten(path, name, text):
    """A file with other bytes, and the manifest's size and sha256 with it."""
    data = text.encode()
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest_change(path, lambda m: m["files"].update({name: facts}))


def other_tactic(path, name):
    value = json.loads((path / name).read_text())
    key = next(key for key in value if key != "_metadata")
    rewritten(path, name, json.dumps({**value, key: ["TiledRunner", 9]}))


RANK1 = f"engine/{samples.DIGEST}/autotune_configs_dp0_rank1.json"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / RANK1).write_text("{}"), "has 2 bytes, the manifest says"),
        (lambda p: (p / RANK1).unlink(), "is in the manifest and not a file here"),
        (lambda p: (p / "engine" / "stray").write_text("x"), "engine/stray is not in the manifest"),
        (lambda p: (p / "engine" / "link").symlink_to("/etc"), "is not a regular file"),
        (lambda p: other_tactic(p, RANK1), "differ: cpu_gemm"),
        (lambda p: rewritten(p, RANK1, '{"a": 1, "a": 2}'), "duplicate key"),
        (lambda p: other_tactic(p, CACHE_FILE), "is not the union of the engine's files"),
        (lambda p: manifest_change(p, lambda m: m["options"].clear()), "describes no layout of vllm"),
        (
            lambda p: manifest_change(p, lambda m: m["options"]["layout"].update(directory="x")),
            "the files of one start",
        ),
        (
            lambda p: manifest_change(p, lambda m: [m["plan"].pop(n) for n in ("engine", "digest")]),
            "its plan names no engine",
        ),
        (lambda p: manifest_change(p, lambda m: m["ranks"][1].update(entries=2)), "ranks' files hold [3, 3] entries"),
        (lambda p: (p / "more").mkdir(), "more: is not a regular file"),
        (lambda p: manifest_change(p, lambda m: m["files"].update({"engine/../x": m["files"][RANK1]})), "a file named"),
    ],
)
def test_a_damaged_key_of_an_engine_is_refused(tmp_path, damage, said):
    damage(samples.write_engine(tmp_path, ranks=True))
    assert any(said in line for line in findings(tmp_path)), findings(tmp_path)
    with pytest.raises(CacheRefused):
        collect([tmp_path])


def test_an_engine_is_part_of_the_plan_s_meaning():
    plain = samples.plan()
    assert "engine" not in plain.to_json() and "engine" not in plain.meaning()
    run = replace(plain, ops=(), engine=samples.RUN)
    assert Plan.from_json(run.to_json()) == run
    others = [
        replace(samples.RUN, version="0.28.1"),
        replace(samples.RUN, model="/models/y"),
        replace(samples.RUN, arguments=("/models/x",)),
        replace(samples.RUN, variables={"A": "1"}),
        replace(samples.RUN, config={"config.json": "{}"}),
    ]
    assert len({replace(run, engine=one).digest for one in (samples.RUN, *others)}) == 6
    for wrong in ([], {"name": "vllm"}, {**run.to_json()["engine"], "arguments": [3]}):
        with pytest.raises(PlanInvalid):
            Plan.from_json({**run.to_json(), "digest": None, "engine": wrong})


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "hf_quant_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("engine", "words", "world", "path"),
    [
        ("vllm", "/models/x", 1, "/models/x"),
        ("vllm", "/models/x -tp 4 --enable-expert-parallel", 4, "/models/x"),
        ("VLLM", "--model=/m/x --tensor_parallel_size=2 --pipeline-parallel-size 2 -dp 2", 8, "/m/x"),
        ("sglang", "--model-path '/models/a b' --tp 8 --dp-size 4 --enable-dp-attention", 8, "/models/a b"),
        ("sglang", "--model-path /models/x --tp-size 2 --dp-size 2", 4, "/models/x"),
    ],
)
def test_the_arguments_say_how_many_ranks_there_are(model, engine, words, world, path):
    start = engine_start(engine, words, "A=1 B='x y'", model)
    assert (start.layout.world, start.run.model, start.run.variables) == (world, path, {"A": "1", "B": "x y"})
    assert sorted(start.run.config) == ["config.json", "hf_quant_config.json"]


@pytest.mark.parametrize(
    ("engine", "words", "variables", "said"),
    [
        ("tgi", "/models/x", "", "no engine 'tgi'"),
        ("", "/models/x", "", "ENGINE_ARGS without ENGINE"),
        ("vllm", "--tensor-parallel-size 2", "", "name no model"),
        ("vllm", "owner/name", "", "is no absolute path"),
        ("vllm", "/models/../x", "", "is no absolute path"),
        ("vllm", "/models/x -tp many", "", "is no number of ranks"),
        ("vllm", "/models/x --config run.yaml", "", "--config file"),
        ("vllm", "/models/x 'open", "", "cannot be split"),
        ("vllm", "/models/x", "A", "is not NAME=VALUE"),
        ("vllm", "/models/x", "VLLM_API_KEY=x", "looks like a secret"),
        ("vllm", "/models/x", "hf_token=abc", "looks like a secret"),
    ],
)
def test_arguments_that_start_no_engine(model, engine, words, variables, said):
    with pytest.raises(EngineArgumentsWrong, match=said) as caught:
        engine_start(engine, words, variables, model)
    assert caught.value.hint


def test_words_that_only_look_like_secrets_or_relative_paths(model):
    path = "/root/.cache/huggingface/hub/m/snapshots/1"
    start = engine_start("vllm", path, "TOKENIZERS_PARALLELISM=false MONKEY=1", model)
    assert start is not None and start.run.model == path
    assert dict(start.run.variables) == {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1"}


def test_a_bundled_model_s_facts_are_no_config(tmp_path):
    with pytest.raises(EngineArgumentsWrong, match="whole config"):
        engine_start("vllm", "/models/x", "", "tiny")


def test_an_engine_s_own_directory_is_explained_as_one(tmp_path):
    path = samples.write_engine(tmp_path / "root", ranks=True)
    shutil.copytree(path / "engine", tmp_path / "vllm")
    (group,) = engine_groups(tmp_path / "vllm")
    good = explain_group(group, Environment(samples.H200))
    assert (good.judgement.verdict, good.judgement.entries) == ("ok", 3) and "2 files of one start" in good.notes[0]
    assert explain_group(group, Environment({**samples.H200, "gpu": "B200"})).judgement.because == "gpu"
    rank = Path(tmp_path / "vllm" / samples.DIGEST / "autotune_configs_dp0_rank1.json")
    value = json.loads(rank.read_text())
    rank.write_text(json.dumps({name: value[name] for name in list(value)[:2]}))
    found = explain_group(engine_groups(tmp_path / "vllm")[0], Environment(samples.H200))
    assert found.broken and "different numbers of entries" in found.judgement.because


ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["..", "/etc", "vllm", "sglang", "v2/x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=ANY, data=st.data())
def test_any_value_anywhere_in_an_engine_s_key_is_answered(tmp_path_factory, value, data):
    """Explained, judged, and read at start: a finding or a miss, never a traceback, nothing outside the copy."""
    root = tmp_path_factory.mktemp("fuzz")
    path = samples.write_engine(root / "root", ranks=data.draw(st.booleans())) / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    inner = data.draw(
        st.sampled_from([manifest, manifest["plan"]["engine"], manifest["options"]["layout"], manifest["files"]])
    )
    inner[data.draw(st.sampled_from(sorted(inner)))] = value
    if data.draw(st.booleans()) and isinstance(manifest["plan"], dict):
        manifest["plan"].pop("digest", None)
    path.write_text(json.dumps(manifest))
    found = explain_tree(walk(root / "root"), Environment(samples.H200), baked=True)
    assert found.verdict in ("ok", "refused") and isinstance(check_root(root / "root")[1], tuple)
    (key,) = keys_below(str(root / "root"))
    assert isinstance(read_baked(str(root / "root"), key).broken, str)
    assert sorted(p.name for p in root.iterdir()) == ["root"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_an_engine_s_files_is_found(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("fuzz")
    path = samples.write_engine(root, ranks=True) / data.draw(st.sampled_from([CACHE_FILE, MANIFEST_FILE, RANK1]))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=6)) + whole[at + data.draw(st.integers(0, 60)) :])
    found = explain_tree(walk(root), Environment(samples.H200), baked=True)
    assert found.verdict == "refused" or path.read_bytes() == whole or path.name == MANIFEST_FILE
