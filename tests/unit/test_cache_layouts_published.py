"""Our paths and hashes beside the engines' own, run from their published packages with everything else stubbed.

Downloads the wheels through pip (about 750 MB; PIPELINE_ENGINE_WHEELS keeps them in a directory) and takes only the few
Python files that are looked at. No GPU, no torch: each engine's own functions run over stand-ins for what they import.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from pipeline.cache.engine_variables import enters_028
from pipeline.cache.layouts import sglang, vllm

pytestmark = pytest.mark.large
DIGEST = "cd" * 32
CACHE = "vllm/model_executor/warmup/flashinfer_autotune_cache.py"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    place = Path(os.environ.get("PIPELINE_ENGINE_WHEELS") or tmp_path_factory.mktemp("wheels"))

    def get(name, version):
        found = list(place.glob(f"{name}-{version}-*.whl"))
        if not found:
            words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(place)]
            # Bytes are only read, never run as they are: the platform is that of the published wheel.
            words += ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
            words += ["--platform", "manylinux_2_28_x86_64", f"{name}=={version}"]
            subprocess.run([sys.executable, "-m", "pip", *words], check=True)
            found = list(place.glob(f"{name}-{version}-*.whl"))
        return zipfile.ZipFile(found[0])

    return get


def module(**names):
    made = types.ModuleType("stub")
    vars(made).update(names)
    return made


@pytest.fixture
def stubs(monkeypatch):
    """Stand-ins in sys.modules, parents included, gone after the test."""

    def put(**modules):
        for name, made in modules.items():
            dotted = name.replace("__", ".")
            parts = dotted.split(".")
            for depth in range(1, len(parts)):
                parent = ".".join(parts[:depth])
                if parent not in sys.modules or not hasattr(sys.modules[parent], "stubbed"):
                    monkeypatch.setitem(sys.modules, parent, module(__path__=[], stubbed=True))
            monkeypatch.setitem(sys.modules, dotted, made)
            if len(parts) > 1:
                setattr(sys.modules[".".join(parts[:-1])], parts[-1], made)

    return put


def workspace(version="0.6.16.post3", arch="90a"):
    return module(FLASHINFER_WORKSPACE_DIR=Path("/home/x/.cache/flashinfer") / version / arch)


def run(source, name="engine"):
    names = {"__name__": name}
    exec(compile(source, name, "exec"), names)
    return names


@pytest.mark.parametrize("override", [None, "/override"])
def test_vllm_028_shares_one_file(wheel, stubs, tmp_path, override):
    factors = ["environment", "configuration"]
    root = str(tmp_path / "override") if override else None
    envs = module(VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=root, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    stubs(
        vllm__envs=envs,
        vllm__compilation__caching=module(aot_compile_hash_factors=lambda config: factors),
        flashinfer__jit=module(env=workspace()),
    )
    theirs = run(wheel("vllm", "0.28.0").read(CACHE).decode())
    runner = types.SimpleNamespace(vllm_config=None)
    environment = {vllm.VARIABLE: root} if root else {}
    ours = vllm.root_directory(environment, str(tmp_path / "cache"), "0.6.16.post3", "90a")
    assert theirs["flashinfer_autotune_cache_hash"](runner) == vllm.digest_028(factors)
    assert theirs["resolve_flashinfer_autotune_file"](runner) == vllm.shared_file(ours, vllm.digest_028(factors))


@pytest.mark.parametrize("override", [None, "/override"])
def test_vllm_033_has_a_file_for_each_rank(wheel, stubs, tmp_path, override):
    root = str(tmp_path / "override") if override else None
    cache_config = types.SimpleNamespace(mamba_block_size=None, kv_cache_layout=None)
    asked = []

    def compute_hash(**words):
        asked.append(words)
        return "hash-of-the-configuration"

    config = types.SimpleNamespace(
        cache_config=cache_config,
        compute_hash=compute_hash,
        parallel_config=types.SimpleNamespace(data_parallel_rank=1),
    )
    stubs(
        vllm__envs=module(VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR=root, VLLM_CACHE_ROOT=str(tmp_path / "cache")),
        vllm__config=module(CacheConfig=None, VllmConfig=None, replace=None),
        vllm__logger=module(init_logger=lambda name: None),
        vllm__distributed__parallel_state=module(get_world_group=lambda: types.SimpleNamespace(rank_in_group=3)),
        flashinfer__jit=module(env=workspace("0.7.2.post1")),
    )
    theirs = run(wheel("vllm", "0.33.0").read(CACHE).decode())
    runner = types.SimpleNamespace(vllm_config=config)
    digest = vllm.digest_033("hash-of-the-configuration")
    environment = {vllm.VARIABLE: root} if root else {}
    ours = vllm.root_directory(environment, str(tmp_path / "cache"), "0.7.2.post1", "90a")
    assert theirs["flashinfer_autotune_cache_hash"](runner) == digest
    assert asked == [{"include_version": False}]
    assert theirs["resolve_rank_flashinfer_autotune_file"](runner) == vllm.rank_file(ours, digest, 1, 3)
    assert theirs["resolve_flashinfer_autotune_v2_root"]() == (Path(root) if root else None)


def annotated(tree, name):
    return next(n for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name)


def ignored(source):
    """The names that `compile_factors` leaves out, and all that it knows."""
    tree = ast.parse(source)
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "compile_factors")
    left = next(
        n for n in ast.walk(function) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "ignored_factors"
    )
    known = next(
        n
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "environment_variables" and n.value is not None
    )
    assert isinstance(known.value, ast.Dict)
    return ast.literal_eval(left.value), {ast.literal_eval(key) for key in known.value.keys if key is not None}


def test_the_variables_that_enter_028s_hash(wheel):
    left, known = ignored(wheel("vllm", "0.28.0").read("vllm/envs.py").decode())
    assert len(known) > 200
    names = {name for name in known | left if name.startswith("VLLM_")}
    assert {name for name in names if enters_028(name)} == {name for name in names if name not in left}


def test_vllm_033_asks_what_we_ask_of_the_ranks(wheel, tmp_path):
    """Its fingerprint of a file is the record and the number of other keys; ours counts the same."""
    source = wheel("vllm", "0.33.0").read("vllm/model_executor/warmup/kernel_warmup.py").decode()
    tree = ast.parse(source)
    wanted = next(n for n in tree.body if getattr(n, "name", "") == "_autotune_cache_fingerprint")
    fingerprint = run("import json\nfrom pathlib import Path\n" + ast.unparse(wanted))["_autotune_cache_fingerprint"]
    for extra in ({}, {"_records": {"a": 1}, "_generation": "x"}):
        path = tmp_path / DIGEST / "autotune_configs_dp0_rank0.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"_metadata": {"gpu": "x"}, "k": ["R", 1], **extra}))
        other = path.with_name("autotune_configs_dp0_rank1.json")
        other.write_text(json.dumps({"_metadata": {"gpu": "x"}, "k": ["R", 1]}))
        group = vllm.gather(str(tmp_path))[0]
        theirs = fingerprint(path) == fingerprint(other)
        assert theirs == (not any("different numbers" in line for line in vllm.check(group)))


def test_sglang_names_a_file_for_each_rank(wheel, stubs, tmp_path):
    source = wheel("sglang", "0.5.23").read("sglang/srt/model_executor/runner/flashinfer_autotune.py").decode()
    tree = ast.parse(source)
    names = ("flashinfer_autotune_cache_path", "get_flashinfer_autotune_skip_ops")
    wanted = [n for n in tree.body if getattr(n, "name", "") in names]
    assert len(wanted) == 2
    space = types.SimpleNamespace
    stubs(flashinfer=module(__version__="0.7.2"))
    model = space(model_path="/models/x", quantization="fp8")
    kernel = space(flashinfer_autotune_skip_ops=["b", "a"])
    execution = space(moe=space(moe_runner_backend="flashinfer_cutlass"), kernel=kernel)
    parallel = space(tp_size=4, pp_size=1, attn_dp_size=2, moe_ep_size=4, tp_rank=3, pp_rank=0, dp_rank=1)
    given = {
        "Path": Path, "hashlib": hashlib,
        "torch": space(cuda=space(get_device_capability=lambda device: (9, 0))),
        "envs": space(SGLANG_CACHE_DIR=space(get=lambda: str(tmp_path))),
        "get_model": lambda: model, "get_exec": lambda: execution, "get_parallel": lambda: parallel,
        "FLASHINFER_AUTOTUNE_WORKAROUND_SKIPS": frozenset(),
    }  # fmt: skip
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted)), given)

    class LlamaConfig:
        pass

    for draft in (False, True):
        config = space(hf_config=LlamaConfig(), quantization="fp4")
        runner = space(dtype="torch.bfloat16", model_config=config, is_draft_worker=draft, device="cuda:0", gpu_id=0)
        served = sglang.Served(
            "/models/x", "torch.bfloat16", "fp8", "flashinfer_cutlass", 4, 1, 2, 4, "LlamaConfig", ("a", "b"),
            "fp4" if draft else None,
        )  # fmt: skip
        ours = sglang.rank_file(tmp_path, "0.7.2", "sm90", served.digest, (3, 0, 1))
        assert given["flashinfer_autotune_cache_path"](runner) == ours
        ours.write_text("{}")
    assert len(sglang.gather(str(tmp_path))) == 2
