"""The GPUs that the engine offers, and how a container gets them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.contract.errors import UsageError

if TYPE_CHECKING:
    from pipeline.daemon import Engine

Access = Literal["none", "cdi", "default-runtime", "runtime"]
_KIND = "nvidia.com/gpu="
_CDI_ALL = f"{_KIND}all"
_BUSY = 1024  # MiB; what the driver itself holds is below that
_DRIVERS = {"12": "525 or newer", "13": "580 or newer"}  # CUDA Toolkit release notes, table of minimum drivers
_SUFFIX_FROM = 90  # from Hopper on FlashInfer compiles for the architecture-specific target: 90a, 100a, …
_FAMILY = {120: "120f"}


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi shows it; memory in MiB."""

    name: str
    uuid: str
    capability: str  # such as 9.0
    memory_used: int
    mig: bool = False

    @property
    def busy(self) -> bool:
        """Whether others hold more memory than the driver itself does."""
        return self.memory_used > _BUSY

    @property
    def arch(self) -> str:
        """FlashInfer's name for the architecture: `90a`, `100a`, `120f`, `89`."""
        number = int(self.capability.replace(".", ""))
        return _FAMILY.get(number, f"{number}a" if number >= _SUFFIX_FROM else str(number))


@dataclass(frozen=True)
class Gpus:
    """How containers get GPUs (`access`), what a probe saw of them, and the driver.

    `devices` are CDI names, or for the nvidia runtime numbers and UUIDs (empty: all). `cuda` is the newest CUDA that
    the driver (or a compatibility package of the image) runs, as (major, minor); None where nobody could say.
    """

    access: Access = "none"
    devices: tuple[str, ...] = (_CDI_ALL,)
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] | None = None

    @property
    def named(self) -> str:
        """The devices by name."""
        return ", ".join(self.devices)

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments that put the GPUs into a container."""
        from docker.types import DeviceRequest

        if self.access == "cdi":
            return {"device_requests": [DeviceRequest(driver="cdi", device_ids=list(self.devices))]}
        if self.access == "runtime":
            which = {"device_ids": list(self.devices)} if self.devices else {"count": -1}
            return {"device_requests": [DeviceRequest(capabilities=[["gpu"]], **which)]}
        return {}

    def facts(self) -> dict[str, Any]:
        """What enters the inputs digest: names, count and driver."""
        return {"gpus": [gpu.name for gpu in self.gpus], "count": len(self.gpus), "driver": self.driver}


NO_GPUS = Gpus()


def chosen(text: str) -> tuple[str, ...]:
    """GPUS= as names: `nvidia.com/gpu=0,nvidia.com/gpu=1`, or `0,1` for the same; raise `UsageError` for neither."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not re.fullmatch(rf"({re.escape(_KIND)})?[A-Za-z0-9][A-Za-z0-9_.:-]*", word)]
    if wrong or (text and not words):
        raise UsageError(
            f"GPUS={text!r} names no GPU",
            hint="such as GPUS=nvidia.com/gpu=all, GPUS=nvidia.com/gpu=0,nvidia.com/gpu=1 or GPUS=0,1",
        )
    return tuple(dict.fromkeys(word if word.startswith(_KIND) else _KIND + word for word in words))


def offered(engine: Engine, *, wanted: str = "") -> Gpus:
    """What the engine says of GPUs, before any container was asked; `wanted` is GPUS=, which chooses some of them."""
    known = [name for name in engine.cdi_devices if name.startswith("nvidia.com/gpu")]
    names = chosen(wanted)
    if names and not (_CDI_ALL in names and engine.default_runtime == "nvidia"):  # that gives all of them
        missing = [name for name in names if known and name not in known]
        if missing:
            raise UsageError(
                f"the Docker Engine knows no CDI device {missing[0]}",
                hint=f"it knows {', '.join(known)}; see `docker info`",
            )
        if not known and "nvidia" in engine.runtimes:  # an engine with CDI switched on need not have a specification
            ids = tuple(name.removeprefix(_KIND) for name in names)
            return Gpus("runtime", devices=() if "all" in ids else ids)
        return Gpus("cdi", devices=names)
    if engine.default_runtime == "nvidia":
        return Gpus("default-runtime")
    if known:
        return Gpus("cdi", devices=(_CDI_ALL if _CDI_ALL in known else known[0],))
    if "nvidia" in engine.runtimes:
        return Gpus("runtime", devices=())
    return Gpus()


def check(found: Gpus, ranks: int, *, require_idle: bool) -> list[str]:
    """Refuse GPUs that cannot serve this plan; return warnings where timings may be unreliable.

    All that a container sees counts, not the first `ranks` of them: CUDA orders GPUs by their speed, nvidia-smi by bus.
    """
    if not found.gpus:
        raise UsageError(
            "DEVICE=cuda, and a container of this Docker Engine sees no GPU",
            hint="`docker run --rm --gpus all IMAGE nvidia-smi` must list them: check driver and NVIDIA's container "
            "toolkit (`nvidia-ctk cdi generate`); or DEVICE=cpu",
        )
    if len(found.gpus) < ranks:
        fits = 1 << (len(found.gpus).bit_length() - 1)  # heads and widths are shared out by powers of two
        raise UsageError(
            f"{ranks} ranks need {ranks} GPUs, the Docker Engine has {len(found.gpus)}",
            hint=f"TP={fits} fits this host; or tune where there are more, and import with CACHE=",
        )
    names = sorted({gpu.name for gpu in found.gpus})
    if len(names) > 1:
        raise UsageError(
            f"the GPUs of this host differ: {', '.join(names)}",
            details=[f"{_KIND}{at}: {gpu.name} ({gpu.uuid})" for at, gpu in enumerate(found.gpus)],
            hint="choose some of one kind with GPUS=, such as GPUS=0,1",
        )
    slices = [gpu for gpu in found.gpus if gpu.mig]
    if slices and ranks > 1:
        raise UsageError(
            f"{slices[0].name} is in MIG mode, and {ranks} ranks need a GPU each: a CUDA process uses one slice",
            hint="`nvidia-smi -mig 0` turns MIG off; or TP=1 on one slice, GPUS=nvidia.com/gpu=0:0",
        )
    busy = [f"{gpu.name} ({gpu.uuid}): {gpu.memory_used} MiB in use" for gpu in found.gpus if gpu.busy]
    if busy and require_idle:
        raise UsageError(
            f"{len(busy)} of the GPUs are in use: {busy[0]}",
            details=busy,
            hint="`nvidia-smi` on that host shows by whom; without --require-idle the timings are unreliable",
        )
    warnings = [f"{line}: timings are unreliable (REQUIRE_IDLE=1, --require-idle, refuses)" for line in busy]
    return warnings + [
        f"{gpu.name} is in MIG mode: a slice is tuned, and its cache is for that slice only (GPUS= chooses one)"
        for gpu in slices
    ]


def check_driver(found: Gpus, needed: str) -> None:
    """Raise `UsageError` when the driver cannot run the image's CUDA (`13.0`); within a major version any can.

    CUDA's compatibility guide: a driver runs programs built for any minor version of the majors that it knows.
    """
    major = needed.partition(".")[0]
    if found.cuda is None or not major.isdecimal() or found.cuda[0] >= int(major):
        return
    raise UsageError(
        f"the image is made for CUDA {needed}, and driver {found.driver or 'of this host'} runs CUDA up to "
        f"{found.cuda[0]}.{found.cuda[1]}",
        hint=f"update the driver ({_DRIVERS.get(major, 'see the release notes of that CUDA')}); or a BASE_IMAGE made "
        f"for CUDA {found.cuda[0]}",
    )


# In what an engine, runc, NVIDIA's runtime or a CDI specification says when it cannot give a container its GPUs.
_OF_GPUS = (
    "nvidia-container-cli", 'runtime "nvidia"', "CDI", "could not select device driver", "unsatisfied condition: cuda",
    "error mounting", "error running",
)  # fmt: skip


def refused_by_engine(image: str, offer: Gpus, said: str) -> UsageError | None:
    """The error where GPUs, or what puts them into a container, kept one of `image` from starting; None otherwise.

    `said` is the engine's own message.
    """
    at = min((said.index(words) for words in _OF_GPUS if words in said), default=-1)
    if offer.access == "none" or at < 0:
        return None
    return UsageError(
        f"the Docker Engine cannot give a container of {image} {offer.named or 'its GPUs'}: {said[at:][:200]}",
        hint="`docker run --rm --gpus all IMAGE nvidia-smi` must work there; after an update of the driver restart "
        "the host, or `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`; `docker info` lists its devices",
    )
