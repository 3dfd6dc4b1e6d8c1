"""The layouts of engines: paths as written by hand from their documentation and code, gathering, rules, offers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import cache_samples as samples
import pytest

from pipeline.cache.layouts import NAMES, Layout, LayoutUnknown, describe, layout_of, plain, sglang, vllm
from pipeline.contract.places import CACHE_FILE

DIGEST = "ab" * 32
KEY16 = "0123456789abcdef"


def file_of(count=3, tactic=1, first=1, **metadata):
    entries = {samples.entry_key(n): ["TiledRunner", tactic] for n in range(first, first + count)}
    return json.dumps({"_metadata": {**samples.H200, **metadata}, **entries})


def put(path, text=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file_of() if text is None else text)
    return path


def only(layout, root):
    groups = layout.gather(str(root))
    assert len(groups) == 1, groups
    return groups[0]


# paths


def test_the_paths_of_vllm():
    root = vllm.root_directory({}, "/root/.cache/vllm", "0.6.16.post3", "90a")
    assert str(root) == "/root/.cache/vllm/flashinfer_autotune_cache/0.6.16.post3/90a"
    assert str(vllm.shared_file(root, DIGEST)) == f"{root}/{DIGEST}/autotune_configs.json"
    assert str(vllm.rank_file(root, DIGEST, 0, 3)) == f"{root}/{DIGEST}/autotune_configs_dp0_rank3.json"
    other = vllm.root_directory({"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/c"}, "/x", "0.7.2", "90a")
    assert str(vllm.rank_file(other, DIGEST, 1, 0)) == f"/c/{DIGEST}/autotune_configs_dp1_rank0.json"


def test_the_last_step_of_vllms_hashes():
    assert vllm.digest_028(["a", "b"]) == hashlib.sha256(b"['a', 'b']").hexdigest()
    assert vllm.digest_033("abc") == hashlib.sha256(b"abc").hexdigest()
    env = {"VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": "/", "HOME": "/", "VLLM_USE_X": "1"}
    assert vllm.hash_environment(env) == {"VLLM_API_KEY": "k", "VLLM_USE_X": "1"}


def test_the_paths_of_sglang():
    served = sglang.Served("/m", "torch.bfloat16", "fp8", "flashinfer_cutlass", 8, 1, 1, 8, "XConfig", ("b", "a"))
    text = "/m|torch.bfloat16|fp8|flashinfer_cutlass|8|1|1|8|XConfig|candidate_selection=v2_default|skip_ops=a,b"
    assert served.digest == hashlib.sha256(text.encode()).hexdigest()[:16]
    draft = replace(served, draft_quantization="None")
    assert draft.digest == hashlib.sha256(f"{text}|draft_quant=None".encode()).hexdigest()[:16]
    path = sglang.rank_file(Path("/c"), "0.7.2", "sm90", KEY16, (3, 0, 1))
    assert str(path) == f"/c/flashinfer/autotune/0.7.2/sm90/{KEY16}/rank_tp3_pp0_dp1.json"


# every adapter keeps the same promises


@pytest.fixture(params=NAMES)
def made(request, tmp_path):
    """An adapter and the root of a sound group in its layout."""
    root = tmp_path / "root"
    if request.param == "plain":
        samples.write(root, "NVIDIA H200")
    elif request.param == "vllm":
        for rank in range(2):
            put(vllm.rank_file(root, DIGEST, 0, rank))
    else:
        for rank in range(2):
            put(sglang.rank_file(root, "0.7.2", "sm90", KEY16, (rank, 0, 0)))
    return layout_of(request.param), root


def test_a_sound_group_is_gathered_and_confirmed(made):
    layout, root = made
    group = only(layout, root)
    assert layout.check(group) == ()
    assert group.layout == layout.NAME and all((root / group.directory) == f.path.parent for f in group.files)


def test_an_offer_leads_the_engine_back_to_the_same_names(made, tmp_path):
    layout, root = made
    group = only(layout, root)
    offer = layout.offer(group)
    place = tmp_path / "copy" / offer.directory
    place.mkdir(parents=True)
    for one in root.joinpath(group.directory).iterdir():
        (place / one.name).write_bytes(one.read_bytes())
    again = only(layout, tmp_path / "copy")
    assert layout.check(again) == ()
    assert {f.place for f in again.files} == {f.place for f in group.files}
    run = replace(samples.RUN, variables={})
    said = describe(layout, group, run, {"VLLM_API_KEY": "k", "VLLM_PORT": "1", "HOME": "/"})
    assert (said["directory"], said["arguments"]) == (offer.directory, list(run.arguments))
    assert said.get("variables") == ({"VLLM_API_KEY": "k"} if group.parts.get("kind") == "shared" else None)


def test_links_are_not_gathered(made, tmp_path):
    layout, root = made
    (tmp_path / "linked").mkdir()
    for one in root.iterdir():
        (tmp_path / "linked" / one.name).symlink_to(one)
    assert layout.gather(str(tmp_path / "linked")) == ()
    assert layout.gather(str(tmp_path / "none")) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": ["R", 1]}', json.dumps({"_metadata": samples.H200})])
def test_an_unsound_file_is_named(made, text):
    layout, root = made
    path = only(layout, root).files[-1].path
    path.write_text(text)
    said = layout.check(only(layout, root))
    assert said and any(path.name in line for line in said)


def test_there_is_no_other_adapter():
    assert {module.NAME for module in (plain, vllm, sglang)} == set(NAMES)
    with pytest.raises(LayoutUnknown, match="tensorrt"):
        layout_of("tensorrt")
    modules: list[Layout] = [layout_of(name) for name in NAMES]
    assert all(callable(module.gather) for module in modules)


# vLLM's own rules


def test_a_shared_file_of_vllm(tmp_path):
    put(vllm.shared_file(tmp_path / "flashinfer_autotune_cache" / "0.6.16.post3" / "90a", DIGEST))
    group = only(vllm, tmp_path)
    assert (group.parts["kind"], vllm.check(group)) == ("shared", ())
    assert vllm.offer(group).directory == DIGEST
    put(vllm.rank_file(group.files[0].path.parent.parent, DIGEST, 0, 0))
    assert "both a shared file and files of single ranks" in vllm.check(only(vllm, tmp_path))[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: put(vllm.rank_file(root, DIGEST, 0, 1), file_of(4)), "different numbers of entries"),
        (lambda root: put(vllm.rank_file(root, DIGEST, 0, 1), file_of(gpu="NVIDIA H100")), "another record"),
        (lambda root: put(vllm.rank_file(root, DIGEST, 0, 1), file_of(tactic=2)), "differ: cpu_gemm"),
        (lambda root: vllm.rank_file(root, DIGEST, 0, 0).unlink(), "no file for dp 0, rank 0"),
        (lambda root: put(vllm.rank_file(root, DIGEST, 1, 0)), "no file for dp 1, rank 1"),
    ],
)
def test_ranks_of_vllm_that_do_not_belong_together(tmp_path, change, said):
    for rank in range(2):
        put(vllm.rank_file(tmp_path, DIGEST, 0, rank))
    change(tmp_path)
    assert any(said in line for line in vllm.check(only(vllm, tmp_path)))


def test_experts_of_vllm_may_hold_other_keys(tmp_path):
    for rank in range(2):
        put(vllm.rank_file(tmp_path, DIGEST, 0, rank), file_of(first=1 + 10 * rank))
    assert vllm.check(only(vllm, tmp_path)) == ()


def test_stages_of_vllm_may_choose_for_themselves(tmp_path):
    for rank in range(4):
        put(vllm.rank_file(tmp_path, DIGEST, 0, rank), file_of(tactic=rank // 2))
    group = only(vllm, tmp_path)
    assert vllm.check(group)
    assert vllm.check(replace(group, parts={**group.parts, "team": "2"})) == ()


def test_a_directory_of_another_name_is_not_vllms(tmp_path):
    put(tmp_path / "x" / "autotune_configs_dp0_rank0.json")
    assert "is not named by a hash" in vllm.check(only(vllm, tmp_path))[0]


def store(root, manifest=None, name="", key="k"):
    """FlashInfer's managed store with one entry."""
    value = {**samples.H200, "cache_schema": "v2"} if manifest is None else manifest
    spelled = json.dumps(value, sort_keys=True, separators=(",", ":"))
    place = root / "v2" / (name or hashlib.sha256(spelled.encode()).hexdigest()[:16])
    put(place / "manifest.json", json.dumps(value))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return put(place / "entries" / f"{digest}.json", json.dumps({"key": key, "runner": "R", "tactic": 1}))


def test_a_managed_store(tmp_path):
    entry = store(tmp_path / "autotune")
    group = only(vllm, tmp_path)
    assert (group.parts["kind"], vllm.check(group)) == ("store", ())
    assert vllm.offer(group).directory == f"v2/{entry.parent.parent.name}"
    entry.rename(entry.with_name("0" * 24 + ".json"))
    assert "is not named by its key" in vllm.check(only(vllm, tmp_path))[0]
    (entry.parent / f"{'0' * 24}.json").write_text('{"key": 3}')
    assert "is no entry" in vllm.check(only(vllm, tmp_path))[0]
    (entry.parent / f"{'0' * 24}.json").unlink()
    assert "has no entries" in vllm.check(only(vllm, tmp_path))[0]
    store(tmp_path / "other", name="0" * 16)
    assert any(
        "is not the digest of its manifest" in line for line in vllm.check(vllm.gather(str(tmp_path / "other"))[0])
    )


# SGLang's own rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (file_of(first=11), "SGLang deletes them"),  # experts: public reports of a cache discarded at every boot
        (file_of(tactic=2), "differ: cpu_gemm"),
        (file_of(gpu="NVIDIA H100"), "another record"),
    ],
)
def test_ranks_of_sglang_that_are_not_equal(tmp_path, text, said):
    for rank in range(2):
        put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (rank, 0, 0)), file_of() if rank else text)
    assert any(said in line for line in sglang.check(only(sglang, tmp_path)))


def test_other_stages_of_sglang_tune_for_themselves(tmp_path):
    for pp in range(2):
        for tp in range(2):
            put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (tp, pp, 0)), file_of(tactic=pp))
    assert sglang.check(only(sglang, tmp_path)) == ()
    sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (1, 1, 0)).unlink()
    assert any("no file for pp 1, dp 0, tp 1" in line for line in sglang.check(only(sglang, tmp_path)))


def test_data_parallel_attention_of_sglang_divides_the_tensor_parallel_ranks(tmp_path):
    for tp in range(4):
        put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (tp, 0, tp // 2)))
    assert sglang.check(only(sglang, tmp_path)) == ()
    put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (3, 0, 1)), file_of(tactic=9))
    said = sglang.check(only(sglang, tmp_path))
    assert any("differ: cpu_gemm" in line for line in said) and any("SGLang deletes them" in line for line in said)


def test_the_same_value_spelled_otherwise_is_equal_to_sglang(tmp_path):
    put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (0, 0, 0)))
    put(sglang.rank_file(tmp_path, "0.7.2", "sm90", KEY16, (1, 0, 0)), json.dumps(json.loads(file_of()), indent=2))
    assert sglang.check(only(sglang, tmp_path)) == ()


def test_the_group_of_a_device_name_is_recognised(tmp_path):
    put(tmp_path / "flashinfer" / "autotune" / "0.7.2" / "sm100" / KEY16 / "rank_tp0_pp0_dp0_gpuGPU-1-2.json")
    group = only(sglang, tmp_path)
    assert group.parts == {"flashinfer_version": "0.7.2", "sm": "sm100", "digest": KEY16}
    assert sglang.check(group) == ()


def test_a_plain_group_is_held_against_its_manifest(tmp_path):
    path = samples.write(tmp_path, "NVIDIA H200")
    (path / CACHE_FILE).write_bytes((path / CACHE_FILE).read_bytes().replace(b"3", b"4", 1))
    assert any("sha256" in line for line in plain.check(only(plain, tmp_path)))
