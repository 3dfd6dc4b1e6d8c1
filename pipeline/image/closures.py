"""The sets of wheels that go into an image, and what pip must not bring into each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import UsageError

_NOT_CUDA = {"nvidia-ml-py"}  # bindings to the driver's library by ctypes, no library itself
_CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")

Report = Mapping[str, Any]  # pip's installation report


class TorchNotForCpu(UsageError):
    """pip would install a CUDA build of torch, or CUDA libraries, into the CPU image."""


class TorchNotForCuda(UsageError):
    """pip would install a torch into the CUDA image that is built for a CPU or for another CUDA."""


class PinsIncomplete(UsageError):
    """pip would install something that requirements do not pin."""


@dataclass(frozen=True)
class Closure:
    """A rendered requirements file, and how its wheels are chosen.

    `alone` names what is taken without its dependencies; `without` excludes a build of a package, as a specifier;
    `refuse` raises when pip's installation report holds what this image must not have.
    """

    name: str
    alone: tuple[str, ...] = ()
    without: Mapping[str, str] | None = None
    refuse: Callable[[Report], None] | None = None

    @property
    def file(self) -> str:
        """Its file below requirements/."""
        return f"{self.name}.txt"


def normal(name: str) -> str:
    """A distribution's name with dashes and in lower case."""
    return name.lower().replace("_", "-").replace(".", "-")


def listed(report: Report) -> dict[str, str]:
    """Name to version of what pip would install."""
    return {normal(item["metadata"]["name"]): str(item["metadata"]["version"]) for item in report["install"]}


def refuse_cuda(report: Report) -> None:
    """Raise `TorchNotForCpu` when pip's installation report holds a CUDA torch or any CUDA library."""
    found = listed(report)
    torch = found.get("torch", "")
    extra = sorted(n for n in found if n.startswith(_CUDA_PREFIXES) and n not in _NOT_CUDA)
    if (torch and not torch.endswith("+cpu")) or extra:
        what = f"torch {torch}" if torch and not torch.endswith("+cpu") else ", ".join(extra[:3])
        raise TorchNotForCpu(
            f"pip would bring {what} into the CPU image"
            + (f" with {len(extra)} CUDA packages" if extra and torch else ""),
            hint="add PyTorch's index of CPU wheels to pip's own configuration (`pip config set global.extra-index-url "
            "URL`), or a find-links folder that holds the +cpu wheel",
        )


def refuse_other_cuda(cuda: str) -> Callable[[Report], None]:
    """Refuse a torch whose local label names no CUDA or another one; no label is the index's usual CUDA build."""
    major, minor = cuda.split(".")[:2]

    def refuse(report: Report) -> None:
        torch = listed(report).get("torch", "")
        label = torch.partition("+")[2]
        if label not in ("", f"cu{major}{minor}"):
            raise TorchNotForCuda(
                f"pip would bring torch {torch} into the image for CUDA {major}.{minor}",
                hint=f"add an index that has torch for CUDA {major}.{minor} (cu{major}{minor}) to pip's own "
                "configuration, or move CUDA_VERSION: `pipeline versions bump CUDA_VERSION=…`",
            )

    return refuse


def refuse_unpinned(report: Report, pins: Mapping[str, str]) -> None:
    """Raise `PinsIncomplete` when pip would install something else than what is pinned; local labels are its choice."""
    from packaging.version import Version

    loose = [
        f"{name}=={version}"
        for name, version in listed(report).items()
        if name not in pins or Version(pins[name]) not in (Version(version), Version(Version(version).public))
    ]
    if loose:
        raise PinsIncomplete(
            f"{len(loose)} packages are needed and not pinned: {', '.join(loose[:5])}",
            hint="add them to versions.json and the requirements template, then `pipeline versions sync`",
        )


# FlashInfer requires its whole CUDA tool chain (cudnn-frontend, cutlass-dsl, cuda-tile …), of which the AutoTuner on a
# CPU imports nothing: it is taken without its dependencies, and the build's import proves that this is enough.
CPU = Closure("image-cpu", alone=("flashinfer-python",), refuse=refuse_cuda)
COMPILER = Closure("compiler-cuda")


def cuda(version: str, torch: str) -> Closure:
    """The CUDA image's wheels; where an index has torch for CPUs too, that build is not considered."""
    return Closure("image-cuda", without={"torch": f"!={torch}+cpu"}, refuse=refuse_other_cuda(version))
