"""Kinds of caches, known by the directory that they lie in. Standard library only: it runs in containers too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

ROOT = "/opt/warm"  # of all caches that a server writes, in the warm-up as in the image
PLACE = (
    "/opt/pipeline/server"  # of what we say of them: outside of ROOT, so that an empty mount there hides nothing of it
)
COLD = "PIPELINE_SERVER_CACHES"  # at_start reads it: a folder in place of ROOT
MODULES_FILE = f"{PLACE}/modules.json"  # at_start reads it

BYTECODE = "python-bytecode"
MODULES = "flashinfer-modules"
MANIFEST = "manifest"
AT_START = "python-start"
OTHER = "other"

# Below ROOT, longest first where one lies in another. Source: the defaults of vLLM 0.26 and 0.32, SGLang 0.5.23.
_BELOW = (
    ("vllm/torch_compile_cache", "torch-compile"),
    ("vllm/torch_aot_compile", "torch-compile"),
    ("vllm/flashinfer_autotune_cache", "flashinfer-autotune"),
    ("vllm/modelinfos", "model-info"),
    ("vllm/startup_plan", "startup-plan"),
    ("vllm/deep_gemm", "deep-gemm"),
    ("vllm/rocm_segmented_attention", "triton"),
    ("vllm/xla_cache", "xla"),
    ("inductor", "inductor"),
    ("triton", "triton"),
    ("flashinfer", MODULES),
    ("cuda", "cuda-driver"),
    ("deep_gemm", "deep-gemm"),
    ("tilelang", "tilelang"),
    ("cute_dsl", "cute-dsl"),
    ("tvm_ffi", "tvm-ffi"),
    ("trtllm", "flashinfer-autotune"),
    ("sglang/flashinfer/autotune", "flashinfer-autotune"),
    ("sglang/.cache/flashinfer", MODULES),
    ("sglang/triton", "triton"),
    ("sglang/inductor", "inductor"),
    ("sglang/torch_compile_cache", "torch-compile"),
    ("sglang/nv", "cuda-driver"),
    ("sglang/tilelang", "tilelang"),
    ("sglang/deep_gemm", "deep-gemm"),
    ("sglang/cute_aot", "cute-dsl"),
    ("sglang/jit", "sglang-jit"),
)
# Files that a start writes whatever it finds: nothing is lost without them, and another user could not open them.
_PASSING_NAMES = {".lock", "flashinfer_jit.log", ".ninja_log", ".ninja_deps", "cache_stats.json"}
_PASSING_ENDINGS = (".lock", ".tmp", ".log", ".pid")
_PASSING_FOLDERS = {"locks", "tmp"}
# FlashInfer writes the sources of its attention modules into an empty workspace before it looks for the module that was
# built ahead of time (jit/attention/modules.py of 0.6.14: 11 files for each of two backends of prefill; 22 were new in
# a baked start of vLLM 0.26 with FLASHINFER attention).
_GENERATED = re.compile(r".*/flashinfer/.*/generated/.*")

Sorted = dict[tuple[str, str], dict[str, int]]  # (kind, the directory that holds all of it there) → path → bytes


def place_of(path: str) -> tuple[str, str]:
    """Kind of a file by its absolute path, and the directory that holds all of this kind there."""
    if path.startswith(ROOT + "/"):
        below = path[len(ROOT) + 1 :]
        for folder, kind in _BELOW:
            if below.startswith(folder + "/"):
                return kind, f"{ROOT}/{folder}"
        return OTHER, ROOT
    pure = PurePosixPath(path)
    if pure.suffix == ".pyc" and pure.parent.name == "__pycache__":
        for at, part in enumerate(pure.parts):
            if part in ("site-packages", "dist-packages"):
                return BYTECODE, str(PurePosixPath(*pure.parts[: at + 1]))
    return OTHER, str(pure.parent)


def _passing(path: str) -> bool:
    """Whether a file is written by every start and is no part of a cache: locks, logs, temporary files."""
    pure = PurePosixPath(path.removeprefix(ROOT))
    return (
        pure.name in _PASSING_NAMES
        or pure.name.endswith(_PASSING_ENDINGS)
        or not _PASSING_FOLDERS.isdisjoint(pure.parts[:-1])
        or _GENERATED.fullmatch(path) is not None
    )


def sort(files: Mapping[str, int]) -> tuple[Sorted, dict[str, int]]:
    """Divide files (path → bytes) into kinds, and those that are of no kind. Passing files are left out."""
    found: Sorted = {}
    others: dict[str, int] = {}
    for path, size in sorted(files.items()):
        if not _passing(path):
            kind, place = place_of(path)
            (others if kind == OTHER else found.setdefault((kind, place), {}))[path] = size
    return dict(sorted(found.items())), others


def count(paths: Iterable[str]) -> dict[str, int]:
    """How many of these files are of each kind; bytecode and what is of no kind left out, passing files too."""
    found: dict[str, int] = {}
    for (kind, _), files in sort(dict.fromkeys(paths, 0))[0].items():
        if kind != BYTECODE:
            found[kind] = found.get(kind, 0) + len(files)
    return found
