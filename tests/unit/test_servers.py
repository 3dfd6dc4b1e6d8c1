"""Servers without a server: words, kinds, logs, judging, collecting, explaining, and starts of a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.files import write_json
from pipeline.contract.verdict import Verdict
from pipeline.image.producer import write_entry
from pipeline.servers import adapters, at_start, collect, judge, kinds, manifest, model, watch, words
from pipeline.servers.adapters import adapter_of
from pipeline.servers.containers import Watched
from pipeline.servers.in_place import check_entry, prove_in_place
from pipeline.servers.judge import Summary
from pipeline.servers.manifest import Served, ServerManifest
from pipeline.servers.producer import ServerProducer
from pipeline.servers.starts import PORT, Spec, Start
from pipeline.servers.watch import Order

VLLM = adapter_of("vllm")
# Lines as vLLM 0.26 prints them on one GPU (times in seconds from the process's start).
COLD = [
    (12.5, "(APIServer pid=7) INFO 11-30 10:00:12 [utils.py:233] non-default args: {'model': '/mnt/models'}"),
    (26.4, "(APIServer pid=7) INFO 11-30 10:00:26 [model.py:555] Resolved architecture: LlamaForCausalLM"),
    (31.0, "(EngineCore_DP0 pid=9) INFO 11-30 10:00:31 [core.py:101] Initializing a V1 LLM engine (v0.26.0) with config"),
    (34.0, "(Worker_TP0 pid=10) INFO 11-30 10:00:34 [gpu_model_runner.py:1] Model loading took 15.0 GiB and 2.8 seconds"),
    (40.0, "(Worker_TP0 pid=10) INFO 11-30 10:00:40 [backends.py:1] Compiling a graph for compile range (1, 8192) takes 9 s"),
    (50.0, "(Worker_TP0 pid=10) INFO 11-30 10:00:50 [monitor.py:1] torch.compile takes 15.31 s in total"),
    (54.0, "(Worker_TP0 pid=10) INFO 11-30 10:00:54 [model_runner.py:1] Graph capturing finished in 3 secs, took 1 GiB"),
    (120.0, "(EngineCore_DP0 pid=9) INFO 11-30 10:02:00 [core.py:2] init engine (profile, create kv cache, warmup model)"
     " took 86 s"),
]  # fmt: skip
WARM = [
    *COLD[:4],
    (
        36.0,
        "(Worker_TP0 pid=10) INFO 11-30 10:00:36 [backends.py:2] Directly load the compiled graph(s) from the cache",
    ),
]
OFFLINE = "HF_HUB_OFFLINE=1"
COMPILED = "/opt/warm/vllm/torch_compile_cache/ab12/rank_0_0/backbone"


def vllm(arguments: str = "--model /mnt/models", environment: str = "") -> words.Words:
    (found,) = words.parse("vllm", arguments, environment)
    return found


def told(warm: Summary | None = None) -> ServerManifest:
    sets = tuple(
        Served(("--model", "/mnt/models", *more), {}, Summary(126.9), warm or Summary(35.5))
        for more in (("--max-num-seqs", "128"), ("--max-num-seqs", "64", "--dtype", "float16"))
    )
    return ServerManifest(
        "vllm", {"VLLM_X": "1"}, (), {"vllm": "0.26.0"}, ("VLLM_API_KEY", "VLLM_X"), "NVIDIA H200", sets,
        {"torch-compile": 1},
    )  # fmt: skip


# words


@pytest.mark.parametrize(
    ("server", "arguments", "found", "ranks"),
    [
        ("vllm", "/mnt/models --tensor-parallel-size 2 --data_parallel_size=2", "/mnt/models", 4),
        ("sglang", "--model-path /mnt/models/ --tp 4 --dp 4 --enable-dp-attention", "/mnt/models/", 4),
    ],
)
def test_words_keep_the_spelling_of_the_model(server, arguments, found, ranks) -> None:
    (said,) = words.parse(server, arguments, "")
    assert (said.model, said.ranks) == (found, ranks)


def test_tp_is_the_servers_own_option() -> None:
    assert words.with_tp("vllm", "--model /m -tp 2 -- /n --x '{\"a\": 1}'", 2) == (
        "--model /m -tp 2 -- /n --x '{\"a\": 1}' --tensor-parallel-size 2"
    )
    assert words.with_tp("sglang", "--model-path /m", 4) == "--model-path /m --tp-size 4"
    with pytest.raises(UsageError, match="TP=2, and SERVER_ARGS ask for 1"):
        words.with_tp("vllm", "--model /m --tensor-parallel-size 1", 2)


def test_several_sets_of_arguments_stand_between_two_dashes() -> None:
    one, two = words.parse("vllm", "--model /m --max-model-len 8 -- /n -tp 2", "VLLM_X=1 HF_TOKEN=abcd")
    assert (one.model, two.model) == ("/m", "/n")
    assert one.environment == two.environment == {"VLLM_X": "1"}
    assert ServerProducer((one, two), {}, "tiny", "cuda").ranks == 2
    with pytest.raises(UsageError, match="name no model"):
        words.parse("vllm", "--model /m -- --max-model-len 8", "")


@pytest.mark.parametrize(
    ("server", "arguments", "environment", "message"),
    [
        ("tgi", "--model /m", "", "no server"),
        ("vllm", "", "", "name no model"),
        ("vllm", "--model ./here", "", "neither an absolute path nor a hub id"),
        ("vllm", "--model org/model", "HF_HUB_OFFLINE=0", "the start has no network"),
        ("vllm", "--model /mnt/../etc", "", r"\.\."),
        ("vllm", "--model '/mnt", "", "cannot be parsed"),
        ("vllm", "--model /m --config x.yaml", "", "--config"),
        ("vllm", "--model /m --tensor-parallel-size many", "", "no number of ranks"),
        ("vllm", "--model /m", "1X=2", "NAME=VALUE"),
        ("vllm", "--model /m", "PLAIN", "NAME=VALUE"),
        ("vllm", "--model /m", "NOT_SET_TOKEN", "NOT_SET_TOKEN is not set"),
    ],
)
def test_words_that_make_no_start_are_refused(server, arguments, environment, message) -> None:
    with pytest.raises(UsageError, match=message):
        words.parse(server, arguments, environment)


def test_a_secret_by_name_alone_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "stuvwx")
    said = words.parse("vllm", "--model /m", "VLLM_X=1 HF_TOKEN")[0]
    assert said.secrets == {"HF_TOKEN": "stuvwx"} and said.environment == {"VLLM_X": "1"}


def test_secrets_are_used_and_never_recorded() -> None:
    said = vllm("--model /m --api-key abcdef --hf-token=ghijkl --max-num-batched-tokens 8192",
                "VLLM_API_KEY=mnopqr HF_TOKEN=stuvwx VLLM_MAX_TOKENS=1")  # fmt: skip
    assert set(said.secret_values()) == {"abcdef", "ghijkl", "mnopqr", "stuvwx"}
    assert said.recorded()[2:5] == ("--api-key", "***", "--hf-token=***")
    assert said.recorded()[-1] == "8192"
    assert dict(said.environment) == {"VLLM_MAX_TOKENS": "1"}


def test_the_command_is_as_in_production_but_for_address_weights_and_secrets() -> None:
    command = VLLM.command(vllm("--model /m/ --port 80 --host=0.0.0.0 --api-key abcdef --max-model-len 8192"))
    assert command[:6] == ("vllm", "serve", "--model", "/m/", "--max-model-len", "8192")
    assert "abcdef" not in command
    assert command[-3:] == ("--load-format", "dummy", "--skip-tokenizer-init")


@pytest.mark.parametrize(
    ("arguments", "entrypoint", "options", "shown"),
    [
        ("--model /m --api-key abcdef", ["vllm", "serve"], ("-v", "/your/model:/m:ro"), ("--model", "/m", "--api-key", "***")),
        ("--model org/m", ["/entry.sh"], (), ("vllm", "serve", "--model", "org/m")),
    ],
)  # fmt: skip
def test_how_to_run_the_image_is_said_with_its_words(arguments, entrypoint, options, shown) -> None:
    assert ServerProducer((vllm(arguments, OFFLINE),), {}, "tiny", "cpu").shown(entrypoint) == (options, shown)


# kinds


def test_a_kind_is_known_by_its_place() -> None:
    files = {
        COMPILED: 3,
        "/opt/warm/triton/ab/k.cubin": 4,
        "/opt/warm/triton/ab/k.lock": 0,
        "/opt/warm/inductor/locks/x": 0,
        "/usr/lib/python3/dist-packages/a/__pycache__/b.cpython-312.pyc": 5,
        "/usr/lib/python3.12/json/__pycache__/decoder.cpython-312.pyc": 5,
        "/srv/pipeline/servers/__pycache__/watch.cpython-312.pyc": 5,
        "/root/.netrc": 6,
        "/opt/warm/vllm/unheard-of/x": 7,
    }
    found, others = kinds.sort(files)
    assert {place: sum(files.values()) for place, files in found.items()} == {
        ("torch-compile", "/opt/warm/vllm/torch_compile_cache"): 3,
        ("triton", "/opt/warm/triton"): 4,
        (kinds.BYTECODE, "/usr/lib/python3/dist-packages"): 5,
    }
    assert {path for path in others if not path.endswith(".pyc")} == {"/root/.netrc", "/opt/warm/vllm/unheard-of/x"}
    assert sum(path.endswith(".pyc") for path in others) == 2, "bytecode of packages alone is baked"
    assert kinds.count(files) == {"torch-compile": 1, "triton": 1}


def test_sources_that_flashinfer_generates_are_no_miss_and_a_compiled_module_is() -> None:
    at = f"{kinds.ROOT}/flashinfer/.cache/flashinfer/0.6.14/90a"
    assert kinds.count([f"{at}/generated/batch_prefill_x/batch_prefill_config.inc"]) == {}
    assert kinds.count([f"{at}/cached_ops/batch_prefill_x/batch_prefill_x.so"]) == {"flashinfer-modules": 1}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_every_variable_that_places_a_cache_points_below_the_root(name) -> None:
    placed = adapter_of(name).environment()
    for variable, value in placed.items():
        assert value in {"1", "server"} or value.startswith(kinds.ROOT + "/"), variable
    assert placed["USER"], "torch asks for the user's name, and a user id alone has none"


# phases


def test_seconds_by_phase_and_ranks_of_a_log() -> None:
    start = Start("ready", ready=126.9, lines=COLD, answers=[0.5, 0.1, 6.0])
    found = Summary.of(VLLM, start)
    spent = found.seconds
    assert spent["import"] == 12.5
    assert spent["inspect the model"] == 13.9
    assert spent["of it torch.compile"] == 15.31
    assert spent["of it graph capture"] == 3.0
    assert spent["serve"] == pytest.approx(6.9)
    assert spent["sampled request"] == 6.0
    assert found.events == (("torch-compile", "made", "Worker_TP0", 1),)


def test_the_telling_line_of_a_failed_start() -> None:
    lines = [
        "(EngineCore_DP0 pid=9) ERROR 11-30 10:00:00 [core.py:1] EngineCore failed to start.",
        "(EngineCore_DP0 pid=9) ERROR 11-30 10:00:00 [core.py:1] PermissionError: [Errno 13] '/opt/warm/x.tmp'",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert judge.why(lines) == "PermissionError: [Errno 13] '/opt/warm/x.tmp'"
    warned = (
        "(APIServer pid=7) WARNING 12-01 10:11 [utils.py:299] it can cause `OSError: [Errno 24] Too many open files`"
    )
    assert judge.why([warned, "(EngineCore pid=9) ValueError: no room"]) == "ValueError: no room"
    assert "unrecognized" in judge.why(["usage: vllm", "vllm: error: unrecognized arguments: --max-modle-len"])
    lines = [  # as pydantic says it
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, The repository /mnt/models contains custom code",
    ]
    assert judge.why(lines) == "Value error, The repository /mnt/models contains custom code"


# judging


def reference() -> Summary:
    return Summary.of(VLLM, Start("ready", ready=35.5, lines=WARM))


def test_a_baked_start_that_writes_nothing_is_a_hit() -> None:
    start = Start("ready", ready=36.0, lines=WARM)
    assert judge.findings(["torch-compile"], reference(), start, VLLM) == ()
    assert [one.result for one in judge.by_kind(["torch-compile"], reference(), reference())] == ["hit"]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (Start("ready", lines=WARM, new={COMPILED: 1}), "torch-compile missed: 1 new files"),
        (Start("ready", lines=WARM, changed={COMPILED: 1}), "torch-compile rebuilt"),
        (Start("ready", lines=COLD), "torch-compile missed: its log shows no hit (Worker_TP0)"),
        (Start("ready", lines=WARM, compilers={"cicc": 2}), "compilers ran"),
        (Start("died", message="it ended with exit code 1", lines=[(1.0, "ValueError: no")]), "ValueError: no"),
    ],
)
def test_what_a_baked_start_does_again_is_named(start, message) -> None:
    assert message in " ".join(judge.findings(["torch-compile"], reference(), start, VLLM))


def test_what_the_last_warm_start_did_too_is_no_finding() -> None:
    growing = replace(reference(), new={"torch-compile": 1}, compilers={"ptxas": 1})
    start = Start("ready", lines=WARM, new={COMPILED: 1}, compilers={"ptxas": 1})
    assert judge.findings(["torch-compile"], growing, start, VLLM) == ()


def test_one_rank_that_misses_is_a_finding() -> None:
    both = [*WARM, (36.5, WARM[-1][1].replace("TP0 pid=10", "TP1 pid=11"))]
    found = judge.findings(
        ["torch-compile"], Summary.of(VLLM, Start("ready", lines=both)), Start("ready", lines=WARM), VLLM
    )
    assert "Worker_TP1" in found[0]


# collecting


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Caches of a server below a root of their own, packed."""
    root = tmp_path / "warm"
    monkeypatch.setattr(kinds, "ROOT", str(root))
    name = f"{root}/flashinfer/.cache/flashinfer/0.6.14/90a/cached_ops/sampling/sampling"
    for path, text in {
        f"{root}/vllm/torch_compile_cache/a/x": "graph",
        f"{root}/triton/a/k.lock": "",
        f"{name}.so": "module",
        f"{name}.cuda.o": "object",
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    new = {str(path): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    aot = tmp_path / "package" / "data" / "aot"
    return lambda: collect.pack([Start("ready", new=new)], {"aot": str(aot)}, tmp_path / "pack.tar"), aot


def test_modules_go_where_flashinfer_looks_for_those_built_ahead_of_time(packed, tmp_path) -> None:
    pack, aot = packed
    assert pack() == []
    places = collect.lay(tmp_path / "pack.tar", tmp_path / "root", ())
    assert places == {
        ("torch-compile", f"{kinds.ROOT}/vllm/torch_compile_cache"): 5,
        ("flashinfer-modules", str(aot)): 6,
    }
    assert (tmp_path / "root" / f"{aot}/sampling/sampling.so".lstrip("/")).read_text() == "module"


def test_a_module_that_the_base_brings_is_not_replaced(packed, tmp_path) -> None:
    pack, aot = packed
    (aot / "sampling").mkdir(parents=True)
    (aot / "sampling" / "sampling.so").write_text("the base's own")
    assert "sampling" in pack()[0]
    with tarfile.open(tmp_path / "pack.tar") as stream:
        assert not any("sampling" in name for name in stream.getnames())


def test_what_starts_left_is_described_and_baked_elsewhere_for_the_same_words_alone(packed, tmp_path) -> None:
    pack, _ = packed
    notes = pack()
    new = {str(path): path.stat().st_size for path in Path(kinds.ROOT).rglob("*") if path.is_file()}
    starts = (Start("ready", ready=100.0, lines=COLD, new=new), Start("ready", ready=30.0, lines=WARM))
    facts = {"versions": {"vllm": "0.99"}, "gpu": "NVIDIA H200", "site": str(tmp_path / "site"), "hashed": ["VLLM_X"]}
    producer = ServerProducer((vllm(),), {"config.json": "{}"}, "tiny", "cuda")
    placed = producer.laid("/hf")
    entry = tmp_path / "entry"
    entry.mkdir()
    watched = Watched((starts,), facts, tuple(notes), tmp_path / "pack.tar")
    warm = producer.described(watched, entry / "root", placed)
    assert {"torch-compile", "flashinfer-modules", "manifest", "python-start"} == {one.kind for one in warm.caches}
    write_entry(entry, warm, producer.inputs())
    told = check_entry(replace(producer, entry=entry), entry, {"vllm": "0.99", "sglang": ""})
    assert (told.device, told.sets[0].warm.ready) == ("NVIDIA H200", 30.0)
    assert "another version" in told.notes[0]
    assert replace(producer, entry=entry).made_on == "H200"
    with pytest.raises(CacheRefused, match=r"vllm 0\.99, and the image has 0\.98"):
        check_entry(producer, entry, {"vllm": "0.98"})
    with pytest.raises(CacheRefused, match="another value of arguments"):
        check_entry(replace(producer, sets=(vllm("--model /m"),)), entry, {})
    with pytest.raises(CacheRefused, match="no warm-up of a server"):
        check_entry(producer, tmp_path, {})


ENV = """
import os, pathlib
FLASHINFER_AOT_DIR = pathlib.Path(__file__).parent / "aot"
FLASHINFER_WORKSPACE_DIR = pathlib.Path("/ws/0.6.14", os.environ["ARCH"])
"""
LOOK = """
import site, sys; site.addsitedir(sys.argv[1])
import json, os
import flashinfer.jit.env as env
found = {name: (env.FLASHINFER_AOT_DIR / name / f"{name}.so").exists() for name in ("sampling", "other")}
print(json.dumps([found, os.environ["TRITON_CACHE_DIR"], os.environ["PATH"] == sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("arch", "variable", "offered", "place"),
    [
        ("90a", "", True, "/opt/warm/triton"),
        ("100a", "", False, "/opt/warm/triton"),
        ("90a_100a", "", False, "/opt/warm/triton"),
        ("90a", "/tmp/cold", False, "/tmp/cold/triton"),
    ],
)
def test_what_python_finds_as_it_starts_in_the_image(packed, tmp_path, arch, variable, offered, place) -> None:
    """Modules are offered on the architecture that they were compiled for; one variable leaves out every cache."""
    packed[0]()
    root, site = tmp_path / "root", tmp_path / "site"
    places = collect.lay(tmp_path / "pack.tar", root, ())
    new = {str(path): 1 for path in Path(kinds.ROOT).rglob("*.so")}
    collect.install(root, str(site), places, collect.written([Start(new=new)])[0])
    baked = json.loads((root / kinds.MODULES_FILE.lstrip("/")).read_text())
    assert baked == {"arch": "90a", "names": ["sampling"]}
    jit = root / str(site).lstrip("/") / "flashinfer" / "jit"
    for name in baked["names"], ["other"]:
        (jit / "aot" / name[0]).mkdir(parents=True)
        (jit / "aot" / name[0] / f"{name[0]}.so").touch()
    (jit / "env.py").write_text(ENV)
    (jit / "__init__.py").touch()
    (jit.parent / "__init__.py").touch()
    hook = next(jit.parent.parent.glob("*_start.py"))
    hook.write_text(hook.read_text().replace(kinds.MODULES_FILE, str(root / kinds.MODULES_FILE.lstrip("/"))))
    environment = {"ARCH": arch, "PATH": os.environ["PATH"], "TRITON_CACHE_DIR": "/opt/warm/triton"}
    environment |= {at_start.VARIABLE: variable} if variable else {}
    words = [sys.executable, "-c", LOOK, str(jit.parent.parent), os.environ["PATH"]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [{"sampling": offered, "other": True}, place, True]


def test_a_secret_that_the_server_wrote_down_is_refused(packed, tmp_path) -> None:
    packed[0]()
    with pytest.raises(CacheRefused, match="secret") as caught:
        collect.lay(tmp_path / "pack.tar", tmp_path / "root", ("graph",))
    assert "graph" not in caught.value.message + caught.value.hint
    assert "torch_compile_cache/a/x" in caught.value.details[0]


# the manifest and explain


def test_the_manifest_survives_json() -> None:
    one = told(warm=reference())
    assert ServerManifest.read(json.dumps(one.to_json())) == one
    with pytest.raises(CacheRefused):
        ServerManifest.read("{}")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ("--model /mnt/models --max-num-seqs 256", {}, "max_num_seqs 256, baked with 128"),
        ("/mnt/models/ --max-num-seqs 128", {}, "its spelling enters the hash"),
        ("--model /mnt/models", {}, "max_num_seqs not given, baked with 128"),
        ("--model /mnt/models --max-num-seqs 32 --dtype float16", {}, "max_num_seqs 32, baked with 64"),
        ("--model /mnt/models --max-num-seqs 128", {"VLLM_API_KEY": "s3cret"}, "VLLM_API_KEY ***, baked without it"),
        ("--model /mnt/models --max-num-seqs 128", {"TRITON_CACHE_DIR": "/tmp/t"}, "it places a cache"),
        ("--model /mnt/models --max-num-seqs 128", {kinds.COLD: "/tmp/c"}, "without the baked caches"),
    ],
)
def test_explain_names_what_differs(arguments, environment, message) -> None:
    found = manifest.explain(told(), arguments.split(), environment)
    assert message in str(found[0])
    assert "s3cret" not in str(found)


def test_explain_is_silent_where_nothing_of_the_key_differs() -> None:
    said = ["/mnt/models", "--max-num-seqs=128", "--port", "80", "--served-model-name", "x", "--seed", "3"]
    assert manifest.explain(told(), said, {"VLLM_PORT": "1", "VLLM_X": "1", "HF_HUB_OFFLINE": "0"}) == ()


def test_explain_names_a_hub_model_that_is_asked_for_online() -> None:
    hub = replace(told(), sets=(replace(told().sets[0], arguments=("org/m",)),), environment={"HF_HUB_OFFLINE": "1"})
    assert manifest.explain(hub, ["org/m"], {"HF_HUB_OFFLINE": "true"}) == ()
    (found,) = manifest.explain(hub, ["org/m"], {"HF_HUB_OFFLINE": "0"})
    assert "HF_HUB_OFFLINE 0, baked with 1 (an online server" in str(found)


# the model's files


def test_config_goes_to_the_models_path_or_into_a_hub_cache() -> None:
    files = model.read_model("tiny").files
    assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLM"]
    assert set(model.laid(vllm("--model /mnt/models/"), files, "/hf")) == {"/mnt/models/config.json"}
    commit = "0a" * 20
    found = model.laid(vllm(f"--model org/m --revision {commit}", OFFLINE), files, "/hf")
    assert f"/hf/hub/models--org--m/snapshots/{commit}/config.json" in found
    with pytest.raises(UsageError, match="commit"):
        model.laid(vllm("--model org/m", OFFLINE), files, "/hf")


def test_a_bundled_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for name in ("config.json", "generation_config.json", "other.json"):
        (tmp_path / "tiny" / name).write_text('{"model_type": "qwen3"}')
    bundled, folder = model.read_model("tiny"), model.read_model("./tiny")
    assert json.loads(bundled.files["config.json"])["model_type"] == "llama"
    assert "./tiny" in bundled.notes[0]
    assert folder.files == dict.fromkeys(("config.json", "generation_config.json"), '{"model_type": "qwen3"}')
    assert (bundled.name, folder.name) == ("tiny", "tiny")


def test_a_hub_id_is_asked_of_the_hub(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("pipeline.planning.model_source.fetch_config", lambda *_: tmp_path / "config.json")
    found = model.read_model("Org/My-Model")
    assert (found.name, json.loads(found.files["config.json"])) == ("my-model", {"model_type": "llama"})
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("pipeline.planning.model_source._answers", lambda _: False)
    with pytest.raises(UsageError, match="cannot be reached"):
        model.read_model("Org/My-Model")


@pytest.mark.parametrize("text", ["", "[]", "\xff"])
def test_a_config_that_is_none_is_refused(tmp_path, text) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        model.read_model(str(tmp_path))


# starts of a stand-in, watched


SERVER = """
import http.server, json, os, sys, time, ctypes
root, mode = sys.argv[1], sys.argv[2]
print("starting up", flush=True)
if mode == "dies":
    print("ValueError: the model does not fit", flush=True); sys.exit(3)
if mode == "hangs":
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"VLLM::Worker_TP1", 0, 0, 0)
        os.kill(os.getpid(), 19)
    time.sleep(600)
if mode == "compiles":
    import subprocess
    for words in (["-v"], ["-v", "-"]):
        one = subprocess.Popen([root + "/ptxas", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        time.sleep(1.0); one.communicate()
os.makedirs(root + "/triton", exist_ok=True)
name = root + "/triton/" + (str(len(os.listdir(root + "/triton"))) if mode == "grows" else "kernel")
os.path.exists(name) or open(name, "w").write("x")
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.send_response(500 if mode == "refuses" else 200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), H).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Starts of a stand-in with a file system of its own."""
    root = tmp_path / "warm"
    root.mkdir()
    monkeypatch.setattr(kinds, "ROOT", str(root))
    monkeypatch.setattr(watch, "_SKIPPED", frozenset())
    real = watch.files_of
    monkeypatch.setattr(watch, "files_of", lambda _: real(str(root)))

    def start(mode: str, **changes) -> list[Start]:
        command = (sys.executable, "-c", SERVER, str(root), mode, PORT)
        spec = Spec(command, requests=((("v1/completions", {"n": 1}),),), **{"ready": 30.0, **changes})
        (starts,) = watch.watch(Order((spec,)), tmp_path)["starts"]
        return [Start.read(one) for one in starts]

    return start


def test_starts_end_when_one_writes_nothing_new(stand_in) -> None:
    starts = stand_in("well", most=3)
    assert [one.outcome for one in starts] == ["ready", "ready"]
    assert len(starts[0].new) == 1
    assert not starts[1].new
    assert starts[0].lines[0][1] == "starting up"
    assert len(starts[0].answers) == 1


def test_a_cache_that_grows_is_started_no_more_than_asked(stand_in) -> None:
    from pipeline.servers.producer import _growing

    starts = stand_in("grows", most=3)
    assert len(starts) == 3
    assert "triton grows with every start" in _growing([starts])[0]


def test_a_compiler_that_is_asked_for_its_version_does_not_compile(stand_in, tmp_path) -> None:
    (tmp_path / "warm" / "ptxas").symlink_to("/bin/cat")  # `cat -v` waits for its input
    (start,) = stand_in("compiles")
    assert start.compilers == {"ptxas": 1}


@pytest.mark.parametrize(
    ("mode", "outcome", "message"),
    [
        ("dies", "died", "exit code 3"),
        ("hangs", "timeout", "VLLM::Worker_TP was stopped"),
        ("refuses", "refused", "500"),
    ],
)
def test_a_start_that_fails_is_named(stand_in, mode, outcome, message) -> None:
    (start,) = stand_in(mode, ready=2.0 if mode == "hangs" else 30.0)
    assert start.outcome == outcome
    assert message in start.message
    assert watch._below(os.getpid(), watch._processes()) == set()


@pytest.mark.parametrize(
    ("warm", "device", "result"),
    [("there", "cpu", "pass"), ("gone", "cpu", "triton missed: 1 new files"), ("there", "NVIDIA H200", "")],
)
def test_a_finished_image_is_proven_from_inside(stand_in, tmp_path, monkeypatch, warm, device, result) -> None:
    """A stand-in of a server that writes one kernel, in an image that has it, and in one that lost it."""
    root = tmp_path / "warm"
    monkeypatch.setattr(adapters.Vllm, "serve", (sys.executable, "-c", SERVER, str(root), "well", PORT))
    monkeypatch.setattr(manifest, "FILE", str(tmp_path / "manifest.json"))
    served = Served(
        ("--model", str(tmp_path / "model")), {str(tmp_path / "model/config.json"): "{}"}, Summary(9.0), Summary(5.0)
    )
    made = ServerManifest("vllm", {}, (), {}, (), device, (served,), {"triton": 1})
    write_json(Path(manifest.FILE), made.to_json())
    if warm == "there":
        (root / "triton").mkdir()
        (root / "triton" / "kernel").write_text("x")
    digest = sha256_json(Path(manifest.FILE).read_text())
    about = Verdict("sha256:a", "sha256:b", digest, "vllm/x", device, "static", "pass", {"manifests": 1})
    if not result:
        with pytest.raises(UsageError, match="made on NVIDIA H200, and this is cpu"):
            prove_in_place(about, ready=30.0)
        return
    found = prove_in_place(about, ready=30.0)
    assert (found.level, found.identity, found.checks["starts"]) == ("replay", "sha256:a", 1)
    assert result in (found.result, *(one.partition(": ")[2] for one in found.findings))
    assert not (tmp_path / "model" / "config.json").exists()
    with pytest.raises(CacheRefused, match="not the image of that verdict"):
        prove_in_place(replace(about, manifest_sha256="0"), ready=30.0)


def test_the_rank_that_hangs_fell_silent_first() -> None:
    lines = [(3.0, "(Worker_TP1 pid=8) a"), (5.0, "(EngineCore pid=6) b"), (9.0, "(Worker_TP0 pid=7) c")]
    assert judge.last_words(Start("timeout", lines=lines)) == "last words: Worker_TP1 after 3 s, Worker_TP0 after 9 s"
    assert judge.last_words(Start("timeout", lines=lines[:2])) == ""


def test_a_server_that_is_not_there(tmp_path) -> None:
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"specs": [asdict(Spec(("no-such-server",)))], "facts": []}))
    watch.main([str(order), str(tmp_path / "result.json")])
    assert "no-such-server" in json.loads((tmp_path / "result.json").read_text())["missing"]


def test_what_is_said_of_caches_lies_outside_of_their_root() -> None:
    assert not manifest.FILE.startswith(kinds.ROOT + "/")
    assert (at_start.ROOT, at_start.MODULES, at_start.VARIABLE) == (kinds.ROOT, kinds.MODULES_FILE, kinds.COLD)
