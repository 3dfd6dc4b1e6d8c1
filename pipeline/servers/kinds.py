"""Kinds of caches, told apart by the directory that they lie in. Standard library only: it runs in containers too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

ROOT = "/opt/warm"  # of all caches that a server writes, in the warm-up as in the image

BYTECODE = "python-bytecode"
MODULES = "flashinfer-modules"
MANIFEST = "manifest"
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


@dataclass(frozen=True)
class Found:
    """One kind of cache in a file system: the directory that holds it, its files with their sizes in bytes."""

    kind: str
    path: str
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The sum of the sizes."""
        return sum(self.files.values())


def kind_of(path: str, root: str = ROOT) -> str:
    """The kind of a file by its absolute path; `OTHER` for what is of no known kind."""
    return place_of(path, root)[0]


def place_of(path: str, root: str = ROOT) -> tuple[str, str]:
    """Kind, and the directory that holds all of this kind there."""
    if path.startswith(root + "/"):
        below = path[len(root) + 1 :]
        for folder, kind in _BELOW:
            if below.startswith(folder + "/"):
                return kind, f"{root}/{folder}"
        return OTHER, root
    pure = PurePosixPath(path)
    if pure.suffix == ".pyc" and pure.parent.name == "__pycache__":
        for at, part in enumerate(pure.parts):
            if part in ("site-packages", "dist-packages"):
                return BYTECODE, str(PurePosixPath(*pure.parts[: at + 1]))
    return OTHER, str(pure.parent)


def passing(path: str, root: str = ROOT) -> bool:
    """Whether a file is written by every start and is no part of a cache: locks, logs, temporary files."""
    pure = PurePosixPath(path.removeprefix(root))
    return (
        pure.name in _PASSING_NAMES
        or pure.name.endswith(_PASSING_ENDINGS)
        or not _PASSING_FOLDERS.isdisjoint(pure.parts[:-1])
    )


def sort(files: Mapping[str, int], root: str = ROOT) -> tuple[tuple[Found, ...], dict[str, int]]:
    """Divide files (path → bytes) into kinds, and those that are of no kind. Passing files are left out."""
    places: dict[tuple[str, str], dict[str, int]] = {}
    others: dict[str, int] = {}
    for path, size in sorted(files.items()):
        if passing(path, root):
            continue
        kind, place = place_of(path, root)
        if kind == OTHER:
            others[path] = size
        else:
            places.setdefault((kind, place), {})[path] = size
    return tuple(Found(kind, place, found) for (kind, place), found in sorted(places.items())), others


def count(paths: Iterable[str], root: str = ROOT) -> dict[str, int]:
    """How many of these files are of each kind; bytecode and what is of no kind left out, passing files too."""
    found: dict[str, int] = {}
    for path in paths:
        kind = kind_of(path, root)
        if not passing(path, root) and kind not in (OTHER, BYTECODE):
            found[kind] = found.get(kind, 0) + 1
    return found
