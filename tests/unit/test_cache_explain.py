"""`pipeline explain`: verdicts, reasons, advice, cost; and any bytes at all without a traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cache_samples as samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.__main__ import main
from pipeline.cache.advice import advise
from pipeline.cache.environment import Environment, EnvironmentInvalid, parse_environment
from pipeline.cache.explain import explain_file, explain_tree
from pipeline.cache.judge import Field
from pipeline.cache.otherkeys import other_keys
from pipeline.cache.tree import walk
from pipeline.contract.errors import DockerError
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parents[1] / "cases" / "caches"
EXPECTED = json.loads((CASES / "expected.json").read_text())
HERE = EXPECTED["_environment"]["metadata"]


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(HERE))
    return path


def run(capsys, *words):
    code = main(["explain", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"_environment"}))
def test_every_case_by_the_command(capsys, tmp_path, name):
    env = tmp_path / "env.json"
    env.write_text(json.dumps(EXPECTED[name].get("metadata", HERE)))
    code, out, _ = run(capsys, CASES / f"{name}.json", "--env", env, "--json")
    answer = json.loads(out)
    expected = {k: v for k, v in EXPECTED[name].items() if k not in ("note", "metadata")}
    assert {k: answer[k] for k in expected} == expected
    assert list(answer)[:5] == ["verdict", "because", "kind", "entries", "fields"]
    assert all(set(field) == {"name", "saved", "current", "kind"} for field in answer["fields"])
    assert code == (0 if expected["verdict"] == "ok" else 7)
    code_of_text, text, _ = run(capsys, CASES / f"{name}.json", "--env", env)
    assert code_of_text == code
    assert ("REFUSED: " + answer["because"] in text) == (code == 7)


def test_a_misfit_says_why_what_to_do_and_what_it_costs(capsys, record):
    _, text, _ = run(capsys, CASES / "other_gpu_same_arch.json", "--env", record)
    for part in (
        "gpu (hard): saved NVIDIA H100 80GB HBM3, here NVIDIA H200",
        "why: both are 90a",
        "do:  bake a cache tuned on this GPU",
        "tune again at every start",
        "cost: bf16_gemm: 24 shapes run on default tactics",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("field", "why", "remedy"),
    [
        (Field("gpu", "NVIDIA H200", "unknown", "hard"), "no GPU is visible", "docker run --gpus all"),
        (Field("gpu", "NVIDIA H200", "NVIDIA B200", "hard"), "another GPU", "bake"),
        (Field("gpu", "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb", "hard"), "MIG slice", "bake"),
        (Field("gpu", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "hard"), "both are 90a", "bake"),
        (Field("cublas_version", "13.1.0", "13.0.2", "hard"), "LD_LIBRARY_PATH", "base image"),
        (Field("cublas_version", "13.1.0", "cuda-toolkit-13.0", "hard"), "no libcublas", "base image"),
        (Field("cudnn_frontend_version", "1.32.0", "unknown", "hard"), "nvidia-cudnn-frontend is missing", "install"),
        (Field("cudnn_frontend_version", "1.32.0", "1.33.0", "hard"), "pip resolved another", "pin"),
        (Field("cudnn_version", "unknown", "91900", "soft"), "could not be read", "tune again"),
        (Field("cudnn_version", None, "91900", "soft"), "has no such field", "tune again"),
        (Field("cutlass_dsl_version", "a", "b", "hard"), "installed differently", "very image"),
        (Field("arch", "90a", "", "hard"), "FLASHINFER_CUDA_ARCH_LIST is not set", "FLASHINFER_CUDA_ARCH_LIST"),
        (Field("new_in_a_later_version", "a", "b", "hard"), "no table entry", "very image"),
    ],
)
def test_the_knowledge_table(field, why, remedy):
    found = advise(field)
    assert why in found.why and remedy in found.remedy


def test_environment_files_of_every_kind(tmp_path):
    flat = json.dumps(samples.H200).encode()
    assert parse_environment(flat, "x") == Environment(samples.H200, source="x")
    made = samples.record("NVIDIA H200")
    own = parse_environment(json.dumps(made.to_json()).encode(), "x")
    assert (own.record, own.arch) == (samples.H200, "90a")
    manifest, data = samples.manifest("NVIDIA H200")
    assert parse_environment(json.dumps(manifest.to_json()).encode(), "x").arch == "90a"
    assert parse_environment(data, "x").record == samples.H200


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"gpu": "x"}', '{"gpu": 3, "flashinfer_version": "1"}', '{"gpu": "x", "gpu": "y"}', "nul",
     '{"flashinfer": 3, "arch": "90a"}', '{"record": {}, "plan": {}, "schema": 1}', '{"_metadata": 3}',
     '{"flashinfer_version": "1", "gpu": null}', "\ud83d", '{"gpu": NaN}'],
)  # fmt: skip
def test_a_bad_environment_is_a_usage_error(capsys, tmp_path, text):
    path = tmp_path / "env.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    code, out, err = run(capsys, CASES / "h200_real.json", "--env", path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "hint: " in err
    with pytest.raises(EnvironmentInvalid):
        parse_environment(path.read_bytes(), "x")


def test_bad_usage(capsys, tmp_path, record):
    assert run(capsys, tmp_path / "none.json")[0] == 2
    assert run(capsys, "./none")[0] == 2
    assert run(capsys, "")[0] == 2
    assert run(capsys, CASES / "h200_real.json", "--env", tmp_path / "none")[0] == 2
    assert run(capsys, CASES / "h200_real.json", "--env", tmp_path)[0] == 2
    assert run(capsys, CASES / "h200_real.json", "--live")[0] == 2
    assert run(capsys, CASES / "h200_real.json", "--env", record, "--live")[0] == 2
    assert run(capsys, "x\0y")[0] == 2
    for bound in ("nan", "inf", "-1", "0"):
        code, _, said = run(capsys, "x", "--live", "--startup-max-wait", bound)
        assert code == 2 and "is not a number of seconds" in said


def test_an_image_needs_an_engine(capsys, monkeypatch):
    monkeypatch.setattr("pipeline.daemon.find", lambda: None)
    code, _, err = run(capsys, "tuned/tiny:none")
    assert (code, DockerError.exit_code) == (4, 4)
    assert "no Docker Engine answers" in err


def test_a_directory_of_sound_keys(capsys, tmp_path):
    samples.write(tmp_path / "root", "NVIDIA H200")
    samples.write(tmp_path / "root", "NVIDIA H100 80GB HBM3")
    env = tmp_path / "env.json"
    env.write_text(json.dumps(samples.H200))
    code, out, _ = run(capsys, tmp_path / "root", "--env", env, "--json")
    answer = json.loads(out)
    assert (code, answer["verdict"], answer["because"], answer["entries"]) == (0, "ok", "", 3)
    assert sorted(key["verdict"] for key in answer["keys"]) == ["ok", "refused"]
    refused = next(key for key in answer["keys"] if key["verdict"] == "refused")
    assert refused["fields"][0]["name"] == "gpu" and refused["fields"][0]["do"]
    assert refused["cost"]["default_tactics"] == [{"op": "qkv", "shapes": 3, "mean": 1.2, "worst": 1.2}]
    assert refused["cost"]["tuning_seconds"] == 1.0
    env.write_text(json.dumps({**samples.H200, "gpu": "NVIDIA B200"}))
    code, out, _ = run(capsys, tmp_path / "root", "--env", env, "--json")
    assert (code, json.loads(out)["because"]) == (7, "gpu")


def test_a_keys_own_directory_and_its_file(capsys, tmp_path):
    path = samples.write(tmp_path, "NVIDIA H200")
    env = tmp_path / "env.json"
    env.write_text(json.dumps(samples.H200))
    for target in (path, path / CACHE_FILE):
        assert run(capsys, target, "--env", env)[0] == 0
    (path / MANIFEST_FILE).write_text("{")
    assert run(capsys, path, "--env", env)[0] == 7
    assert run(capsys, path / CACHE_FILE, "--env", env)[0] == 0  # FlashInfer reads no manifest


def test_a_manifest_may_be_missing_in_a_directory_but_not_in_an_image(tmp_path):
    path = samples.write(tmp_path, "NVIDIA H200")
    (path / MANIFEST_FILE).unlink()
    env = Environment(samples.H200)
    found = explain_tree(walk(tmp_path), env, baked=False)
    assert found.verdict == "ok" and "no manifest" in found.answers[0].notes[0]
    assert explain_tree(walk(tmp_path), env, baked=True).verdict == "refused"


def test_damage_refuses_even_where_another_key_fits(capsys, tmp_path):
    samples.write(tmp_path / "r", "NVIDIA H200")
    path = samples.write(tmp_path / "r", "NVIDIA H100 80GB HBM3")
    (path / CACHE_FILE).write_bytes((path / CACHE_FILE).read_bytes().replace(b"3", b"4", 1))
    env = tmp_path / "env.json"
    env.write_text(json.dumps(samples.H200))
    code, out, _ = run(capsys, tmp_path / "r", "--env", env, "--json")
    assert code == 7 and "sha256" in json.loads(out)["because"]


def test_an_empty_directory_holds_no_cache(capsys, tmp_path):
    code, out, _ = run(capsys, tmp_path, "--json")
    assert (code, json.loads(out)["because"]) == (7, "no cache")


def test_files_of_other_layouts_are_found_by_their_names(capsys, tmp_path, record):
    place = tmp_path / "c" / "0.7.2" / "90a" / ("0" * 64)
    place.mkdir(parents=True)
    for name in ("autotune_configs_dp0_rank0.json", "rank_1.json"):
        (place / name).write_bytes((CASES / "h200_real.json").read_bytes())
    code, out, _ = run(capsys, tmp_path / "c" / "0.7.2", "--env", record, "--json")
    assert code == 0 and [one["entries"] for one in json.loads(out)["keys"]] == [24, 24]
    (place / "rank_1.json").write_text("{")
    assert run(capsys, tmp_path / "c" / "0.7.2", "--env", record)[0] == 7


def test_another_arch_and_another_processor(tmp_path):
    samples.write(tmp_path / "gpu", "NVIDIA H200")
    found = explain_tree(walk(tmp_path / "gpu"), Environment(samples.H200, arch="100a"), baked=True)
    assert (found.verdict, found.because, found.kind) == ("refused", "arch", "hard")
    samples.write(tmp_path / "cpu")
    cpu = dict(samples.record().host.cpu)
    fits = Environment(samples.CPU, arch="cpu-x86_64", cpu=cpu)
    assert explain_tree(walk(tmp_path / "cpu"), fits, baked=True).verdict == "ok"
    other = replace(fits, cpu={**cpu, "threads": "64", "flags": "1"})
    found = explain_tree(walk(tmp_path / "cpu"), other, baked=True)
    assert found.because == "cpu.flags; cpu.threads"
    assert all(row["why"] and row["do"] for row in found.answers[0].to_json()["fields"])


def test_without_an_environment_nothing_is_claimed(tmp_path):
    path = samples.write(tmp_path, "NVIDIA H200")
    nothing = Environment({}, cpu={"model": "x"}, complete=False, source="no GPU here")
    found = explain_file(path / CACHE_FILE, nothing)
    assert (found.verdict, found.answers[0].judgement.compared) == ("ok", False)
    assert "sound, and not compared with any environment" in found.lines()[1]
    half = replace(nothing, record={"gpu": "NVIDIA H200"})
    assert "fits, as far as it was compared" in explain_file(path / CACHE_FILE, half).lines()[1]
    half = replace(nothing, record={"gpu": "NVIDIA H100"})
    assert explain_file(path / CACHE_FILE, half).because == "gpu"


def test_a_used_file_says_what_it_does_not_answer():
    dead = samples.entry_key(1, runner="A")
    entries = {dead: ["B", 1], samples.entry_key(4): ["TiledRunner", 1]}
    found = explain_file(json.dumps({"_metadata": samples.H200, **entries}).encode(), Environment(samples.H200))
    assert (found.verdict, found.entries) == ("ok", 2)
    assert "cpu_gemm: 1 shapes run on default tactics" in found.lines()[2]


def test_an_answer_that_stands_twice_is_reported_and_costs_once(capsys, tmp_path, record):
    value = json.loads((CASES / "h200_two_tunes_a.json").read_text())
    value |= {other: entry for key, entry in value.items() for other in other_keys(key)}
    (tmp_path / "twice.json").write_text(json.dumps(value))
    code, out, _ = run(capsys, tmp_path / "twice.json")
    assert code == 0 and "252 entries" in out
    assert "note: 84 entries of fp8_gemm stand in the file a second time, for callers whose scales" in out
    value["_metadata"]["gpu"] = "NVIDIA B200"
    (tmp_path / "twice.json").write_text(json.dumps(value))
    code, out, _ = run(capsys, tmp_path / "twice.json", "--env", record)
    assert code == 7 and "fp8_gemm: 84 shapes run on default tactics" in out


def test_a_record_that_lacks_fields_says_what_was_not_compared(capsys, tmp_path):
    (tmp_path / "e.json").write_text('{"flashinfer_version": "0.6.16.post3", "gpu": "NVIDIA H200"}')
    code, out, _ = run(capsys, CASES / "h200_real.json", "--env", tmp_path / "e.json")
    assert code == 0 and "lacks them: cuda_version, cublas_version, cudnn_version" in out
    code, out, _ = run(capsys, CASES / "h200_real.json", "--env", CASES / "h200_real.json")
    assert code == 0 and "lacks" not in out


def test_wildcards_are_noted():
    saved = {**samples.H200, "cudnn_version": "*"}
    data = json.dumps({"_metadata": saved, samples.entry_key(1): ["TiledRunner", 1]}).encode()
    found = explain_file(data, Environment(samples.H200))
    assert found.verdict == "ok" and "cudnn_version" in found.answers[0].notes[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_explained_without_a_traceback(capsys, tmp_path, data):
    path = tmp_path / "any.json"
    path.write_bytes(data)
    code, out, _ = run(capsys, path, "--json")
    assert code in (0, 7)
    assert json.loads(out)["verdict"] == ("ok" if code == 0 else "refused")
    assert run(capsys, path)[0] == code


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_a_baked_key_is_explained_without_a_traceback(capsys, tmp_path_factory, data):
    root = tmp_path_factory.mktemp("fuzz")
    path = samples.write(root) / data.draw(st.sampled_from([CACHE_FILE, MANIFEST_FILE]))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=6)) + whole[at + data.draw(st.integers(0, 60)) :])
    assert run(capsys, root, "--json")[0] in (0, 7)
    assert run(capsys, root)[0] in (0, 7)
