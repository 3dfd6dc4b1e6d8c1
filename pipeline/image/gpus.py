"""The GPUs that the engine offers, and how a container gets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline.contract.errors import UsageError

if TYPE_CHECKING:
    from pipeline.engine import Engine

Access = Literal["none", "cdi", "default-runtime", "runtime"]
_CDI_ALL = "nvidia.com/gpu=all"
_SUFFIX_FROM = 90  # from Hopper on FlashInfer compiles for the architecture-specific target: 90a, 100a, …
_FAMILY = {120: "120f"}


class NoGpu(UsageError):
    """DEVICE=cuda, and the engine offers no GPU."""


class TooFewGpus(UsageError):
    """Fewer GPUs than ranks."""


class MixedGpus(UsageError):
    """GPUs of different kinds in one host."""


class BusyGpu(UsageError):
    """Another process uses a GPU that shall be timed."""


class CdiUnknown(UsageError):
    """A CDI device that the engine does not know."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi tells it; memory in MiB."""

    name: str
    uuid: str
    capability: str  # such as 9.0
    memory_used: int
    mig: bool = False

    @property
    def arch(self) -> str:
        """FlashInfer's name for the architecture: `90a`, `100a`, `120f`, `89`."""
        number = int(self.capability.replace(".", ""))
        return _FAMILY.get(number, f"{number}a" if number >= _SUFFIX_FROM else str(number))


@dataclass(frozen=True)
class Gpus:
    """How containers get GPUs (`access`), what a probe saw of them, and the driver."""

    access: Access = "none"
    device: str = _CDI_ALL
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[str, ...] = field(default=())  # names of processes that hold memory on a GPU

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments that put the GPUs into a container."""
        from docker.types import DeviceRequest

        if self.access == "cdi":
            return {"device_requests": [DeviceRequest(driver="cdi", device_ids=[self.device])]}
        if self.access == "runtime":
            return {"device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])]}
        return {}

    def facts(self) -> dict[str, Any]:
        """What enters the inputs digest: names, count and driver."""
        return {"gpus": [gpu.name for gpu in self.gpus], "count": len(self.gpus), "driver": self.driver}


NO_GPUS = Gpus()


def offered(engine: Engine, *, wanted: str = "") -> Gpus:
    """What the engine says of GPUs, before any container was asked; `wanted` names a CDI device."""
    known = [name for name in engine.cdi_devices if name.startswith("nvidia.com/gpu")]
    if wanted:
        if known and wanted not in known:
            raise CdiUnknown(
                f"the engine knows no CDI device {wanted}", hint=f"it knows {', '.join(known)}; see `docker info`"
            )
        return Gpus("cdi", device=wanted)
    if engine.default_runtime == "nvidia":
        return Gpus("default-runtime")
    if known:
        return Gpus("cdi", device=_CDI_ALL if _CDI_ALL in known else known[0])
    if "nvidia" in engine.runtimes:
        return Gpus("runtime")
    return Gpus()


def check(found: Gpus, ranks: int, *, require_idle: bool) -> list[str]:
    """Refuse GPUs that cannot serve this plan; return warnings about those that can but may lie."""
    if not found.gpus:
        raise NoGpu(
            "DEVICE=cuda, and the engine offers no GPU",
            hint="install NVIDIA's container toolkit (`nvidia-ctk cdi generate`), or set DEVICE=cpu",
        )
    if len(found.gpus) < ranks:
        raise TooFewGpus(
            f"{ranks} ranks need {ranks} GPUs, the engine offers {len(found.gpus)}",
            hint=f"TP={len(found.gpus)} fits this host; or tune where there are more, and import with CACHE=",
        )
    names = sorted({gpu.name for gpu in found.gpus[:ranks]})
    if len(names) > 1:
        raise MixedGpus(f"the ranks would share different GPUs: {', '.join(names)}", hint="choose one kind with GPUS=")
    busy = [
        f"{gpu.name} ({gpu.uuid}): {gpu.memory_used} MiB in use" for gpu in found.gpus[:ranks] if gpu.memory_used > 1024
    ]
    if busy and require_idle:
        raise BusyGpu(
            f"{len(busy)} of the GPUs are in use: {busy[0]}",
            details=[*busy, *found.processes],
            hint="end those processes, or leave --require-idle out and mistrust the times",
        )
    warnings = [f"{line}: times taken now may lie" for line in busy] + list(found.processes if busy else ())
    return warnings + [
        f"{gpu.name} is in MIG mode: a slice is tuned, not the GPU" for gpu in found.gpus[:ranks] if gpu.mig
    ]
