"""What each field of a record is read from, what changes it, and what to do when it differs; and what it costs when a
file, or some of its entries, is not used: ops on default tactics, times, tuning again.

The sources are FlashInfer's `_collect_metadata` (0.6.16.post3 and 0.7.4) and, for `arch` and `cpu.*`, our own record.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from pipeline.flashinfer.gpus import find_arch

from .entrykey import op_and_runner
from .judge import Field
from .otherkeys import second_keys
from .read import CacheFile

if TYPE_CHECKING:
    from pipeline.contract.manifest import Covered, Manifest

_UNKNOWN = (None, "unknown", "None", "")


@dataclass(frozen=True)
class Advice:
    """One field that differs, in words: why it may, and what to do."""

    why: str
    remedy: str


@dataclass(frozen=True)
class Known:
    """A field: where its value comes from, what changes it, what to do when it differs or is not known here."""

    source: str
    changes: str
    remedy: str
    absent: str


FIELDS: dict[str, Known] = {
    "flashinfer_version": Known(
        "flashinfer.__version__",
        "another FlashInfer is installed here; each version reads only its own caches",
        "install the version that tuned it, or tune with this one",
        "FlashInfer is not installed here",
    ),
    "cuda_version": Known(
        "torch.version.cuda, not the driver",
        "torch was built for another CUDA; also torch's minor version decides it",
        "install the torch of the stage that tuned (same index, same `+cuNNN`), or tune again",
        "this torch is built without CUDA",
    ),
    "cublas_version": Known(
        "the libcublas that the loader finds (LD_LIBRARY_PATH, then ldconfig), else pip's nvidia-cublas, else torch",
        "LD_LIBRARY_PATH or ldconfig finds another cuBLAS; a devel base carries one that a runtime base lacks",
        "run on the base image that tuned, with its LD_LIBRARY_PATH; or pin nvidia-cublas and leave the variable alone",
        "no libcublas can be loaded and no nvidia-cublas package is installed here",
    ),
    "cudnn_version": Known(
        "torch.backends.cudnn.version(), else cuDNN's frontend",
        "another libcudnn is loaded: a newer nvidia-cudnn package, or one that LD_LIBRARY_PATH finds",
        "pin nvidia-cudnn in the image to the version that tuned, or tune again",
        "torch finds no cuDNN here: no GPU, a CPU build of torch, or libcudnn missing from the image",
    ),
    "cudnn_frontend_version": Known(
        "the package nvidia-cudnn-frontend (module `cudnn`)",
        "pip resolved another nvidia-cudnn-frontend",
        "pin nvidia-cudnn-frontend in the image to the version that tuned",
        "the module `cudnn` cannot be imported: nvidia-cudnn-frontend is missing from this stage, or fails to load",
    ),
    "cutlass_dsl_version": Known(
        "a digest of how torch, apache-tvm-ffi and nvidia-cutlass-dsl are installed (0.7 on)",
        "the same versions installed differently count as different: another installer, --no-compile, another Python",
        "tune in the very image that will run, as `pipeline build` does",
        "nvidia-cutlass-dsl is not installed here",
    ),
    "gpu": Known(
        "torch.cuda.get_device_name()",
        "another GPU, or another product name of the same silicon",
        "bake a cache tuned on this GPU beside it, or run on the GPU it was tuned on",
        "no GPU is visible here: start the container with GPUs, and look at CUDA_VISIBLE_DEVICES",
    ),
    "arch": Known(
        "FLASHINFER_CUDA_ARCH_LIST, else the visible GPUs",
        "another GPU architecture, or FLASHINFER_CUDA_ARCH_LIST set in one stage only",
        "set FLASHINFER_CUDA_ARCH_LIST alike where it tunes and where it runs, or tune for this architecture",
        "FlashInfer sees no GPU and FLASHINFER_CUDA_ARCH_LIST is not set, so the directory has no architecture",
    ),
    "cpu.model": Known("/proc/cpuinfo", "another processor", "tune on this processor", "/proc/cpuinfo is not readable"),
    "cpu.flags": Known(
        "/proc/cpuinfo, sorted and hashed",
        "the same model with other instructions switched on: another hypervisor, kernel or microcode",
        "tune on this machine",
        "/proc/cpuinfo is not readable",
    ),
    "cpu.threads": Known(
        "the threads of one rank",
        "OMP_NUM_THREADS or the container's CPU limit differs",
        "run it with as many threads as when it was tuned, or tune again",
        "the number of threads is not known here",
    ),
}
_OTHER = Known(
    "FlashInfer's record",
    "something in the environment that this version of the pipeline has no table entry for",
    "tune in the very image that will run",
    "it is not known here",
)


def advise(field: Field) -> Advice:
    """Say why a field may differ the way it does, and what to do."""
    known = FIELDS.get(field.name, _OTHER)
    if field.kind == "soft":
        made = "has no such field" if field.saved is None else f"says {field.saved!r}"
        why = f"the file {made}: it was tuned where this could not be read ({known.source})"
        return Advice(why, "tune again where it can be read; the next save replaces the file if it may write it")
    if field.current in _UNKNOWN:
        return Advice(known.absent, _FOUND_NOWHERE.get(field.name, known.remedy))
    if field.name == "gpu":
        return Advice(_gpu(str(field.saved), field.current), known.remedy)
    if field.name == "cublas_version" and field.current.startswith("cuda-toolkit-"):
        return Advice(f"{known.absent}; FlashInfer falls back to torch's CUDA version", known.remedy)
    return Advice(known.changes, known.remedy)


_FOUND_NOWHERE = {
    "gpu": "docker run --gpus all …, or --device nvidia.com/gpu=all where the Docker Engine uses CDI",
    "cudnn_frontend_version": "install nvidia-cudnn-frontend in this stage, in the version that tuned",
    "arch": "set FLASHINFER_CUDA_ARCH_LIST, or run where the GPUs are visible",
}


def _gpu(saved: str, current: str) -> str:
    if "MIG" in saved.split() or "MIG" in current.split():
        return "a MIG slice has a name of its own, with its profile"
    arch = find_arch(saved)
    if arch and arch == find_arch(current):
        return f"both are {arch}, so the directory is found, but FlashInfer compares the product name"
    return FIELDS["gpu"].changes


@dataclass(frozen=True)
class OpCost:
    """One op: how many shapes run on default tactics, and by what factor that is slower where it was measured.

    `mean` is the geometric mean over its buckets of default time over tuned time, `worst` the largest; None where
    the manifest has no times.
    """

    op: str
    shapes: int
    mean: float | None = None
    worst: float | None = None


@dataclass(frozen=True)
class Cost:
    """What is lost. `seconds` is how long tuning took when the cache was made, None where that is not recorded."""

    ops: tuple[OpCost, ...] = ()
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The cost as JSON values."""
        ops = [{"op": o.op, "shapes": o.shapes, "mean": o.mean, "worst": o.worst} for o in self.ops]
        return {"default_tactics": ops, "tuning_seconds": self.seconds}

    def lines(self) -> list[str]:
        """The cost in words; empty when nothing is lost."""
        said = []
        for op in self.ops:
            line = f"{op.op or 'unreadable keys'}: {op.shapes} shapes run on default tactics"
            if op.mean is not None and op.worst is not None:
                line += f", {op.mean:.2f}x the tuned time on average, {op.worst:.2f}x at worst (measured when tuned)"
            said.append(line)
        if said and self.seconds is not None:
            said.append(f"or tuning again at start takes about {self.seconds:.0f} s")
        return said


def cost_of_refusal(file: CacheFile | None, manifest: Manifest | None) -> Cost:
    """All that a refused file would have answered."""
    if manifest is not None:
        seconds = max((rank.seconds for rank in manifest.ranks), default=None)
        return Cost(tuple(_measured(manifest.covered)), seconds)
    return Cost(_counted(file.entries.keys() - second_keys(file.entries)) if file is not None else ())


def cost_of_dead_entries(file: CacheFile) -> Cost:
    """What a *used* file does not answer: plans that FlashInfer drops, and entries that no lookup can reach.

    A lookup asks for the runner that the key names, so an entry with another runner in it never answers.
    """
    dead = {key: entry for key, entry in file.entries.items() if entry.dropped or _unreachable(key, entry.runner)}
    return Cost(_counted(dead.keys() - second_keys(dead)))


def _unreachable(key: str, runner: str) -> bool:
    if f", '{runner}', " in key:  # how `str()` spells it; the slower look is for what is not spelled so
        return False
    named = op_and_runner(key)[1]
    return bool(named) and named != runner


def _counted(keys: Iterable[str]) -> tuple[OpCost, ...]:
    counts = Counter(op_and_runner(key)[0] for key in keys)
    return tuple(OpCost(op, count) for op, count in sorted(counts.items()))


def _measured(rows: Iterable[Covered]) -> Iterable[OpCost]:
    by_op: dict[str, list[Covered]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    for op, covered in by_op.items():
        ratios = [r.default_ms / r.time_ms for r in covered if _timed(r.default_ms) and _timed(r.time_ms)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        yield OpCost(op, len(covered), mean, max(ratios, default=None))


def _timed(time_ms: float | None) -> TypeGuard[float]:
    """Whether a time can be divided by: real kernels take from nanoseconds to minutes."""
    return time_ms is not None and 1e-6 < time_ms < 1e6
