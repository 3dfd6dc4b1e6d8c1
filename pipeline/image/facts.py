"""What the pipeline must know of a base image: its Python, its C library, what is installed, and the GPUs it sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import BuildError, UsageError

from .contain import Sandbox, run_to_end
from .gpus import CdiUnknown, DriverTooOld, Gpu, Gpus, NoGpu

if TYPE_CHECKING:
    from docker import DockerClient

# Runs with whatever Python the base has, so it keeps to what every Python 3.8 knows.
_PROBE = r"""
import ctypes, importlib.util, json, os, platform, re, shutil, subprocess, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
def smi(query):
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True)
    return [[c.strip() for c in l.split(",")] for l in done.stdout.splitlines()] if done.returncode == 0 else []
def driver_cuda():
    try:
        number = ctypes.c_int()
        found = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0
    except (OSError, AttributeError):
        found = False
    return [number.value // 1000, number.value % 1000 // 10] if found else None
def torch_cuda():
    try:
        with open(os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "version.py")) as file:
            found = re.search(r"^cuda[^=]*= *'([0-9.]+)'", file.read(), re.M)
    except (AttributeError, OSError):
        found = None
    return found.group(1) if found else ""
print(json.dumps({
    "driver_cuda": driver_cuda(), "cuda": torch_cuda(),
    "python": "%d.%d" % sys.version_info[:2], "machine": platform.machine(), "libc": platform.libc_ver(),
    "venv": importlib.util.find_spec("venv") is not None, "compiler": shutil.which("c++") is not None,
    "packages": {n: version(n) for n in ("torch", "flashinfer-python", "vllm", "sglang")},
    "gpus": smi("--query-gpu=name,uuid,compute_cap,memory.used,driver_version,mig.mode.current"),
    "processes": smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"),
}))
"""


_PATIENCE = 120.0  # seconds that a probe may take


class BaseWithoutPython(UsageError):
    """The base image has no usable Python 3."""


class BaseWithoutGlibc(UsageError):
    """The base image is not built on glibc, for which the wheels are made."""


class ProbeFailed(BuildError):
    """A container of the base image did not start."""


@dataclass(frozen=True)
class BaseFacts:
    """`image_id` as the engine knows it; `python` such as `3.11`; `glibc` (major, minor); `machine` as uname says.

    `packages` holds the versions of torch and flashinfer-python that the base brings, empty text where it has none;
    `compiler` says whether it has a C++ compiler, `cuda` for which CUDA its torch is built (empty: none, or no torch).
    """

    image_id: str
    python: str
    machine: str
    glibc: tuple[int, int]
    packages: Mapping[str, str] = field(default_factory=dict)
    compiler: bool = False
    cuda: str = ""

    @property
    def complete(self) -> bool:
        """Whether the base brings torch and FlashInfer, so that nothing need be installed on it."""
        return bool(self.packages.get("torch")) and bool(self.packages.get("flashinfer-python"))

    def platforms(self) -> tuple[str, ...]:
        """Wheel platform tags that this base accepts, newest first (PEP 600, and the three older aliases)."""
        major, minor = self.glibc
        tags = [f"manylinux_{major}_{n}_{self.machine}" for n in range(minor, 16, -1)]
        tags += [f"manylinux2014_{self.machine}"]
        if self.machine == "x86_64":
            tags += [f"manylinux_2_12_{self.machine}", f"manylinux2010_{self.machine}"]
            tags += [f"manylinux_2_5_{self.machine}", f"manylinux1_{self.machine}"]
        return (*tags, f"linux_{self.machine}")


def probe(client: DockerClient, image: str, offer: Gpus) -> tuple[BaseFacts, Gpus]:
    """Start one container of `image`, without network and with the GPUs on offer, and ask; raise one of the above."""
    from docker.errors import APIError

    image_id = str(client.images.get(image).id)
    try:
        ended = run_to_end(client, image, ["python3", "-c", _PROBE], Sandbox(gpus=offer), max_wait=_PATIENCE)
    except APIError as error:
        said = str(error.explanation or error)
        if "executable file not found" in said or "no such file" in said.lower():
            raise BaseWithoutPython(
                f"base image {image} has no python3",
                hint="choose a BASE_IMAGE with Python 3, or leave BASE_IMAGE out",
            ) from error
        if "CDI" in said:
            raise CdiUnknown(
                f"the engine cannot give a container {offer.named}: {said[:200]}",
                hint="`docker info` lists its CDI devices, `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` "
                "makes them; see GPUS=",
            ) from error
        if "unsatisfied condition: cuda" in said:  # NVIDIA's runtime reads NVIDIA_REQUIRE_CUDA of the image
            raise DriverTooOld(
                f"the host's driver is too old for base image {image}: {said[said.index('unsatisfied') :][:120]}",
                hint="update the driver, or choose a BASE_IMAGE made for an older CUDA",
            ) from error
        if 'runtime "nvidia"' in said or "could not select device driver" in said:
            raise NoGpu(
                f"the engine cannot give a container its GPUs: {said[:200]}",
                hint="install NVIDIA's container toolkit on the engine's host (`nvidia-ctk cdi generate`)",
            ) from error
        raise ProbeFailed(
            f"a container of base image {image} did not start: {said[:200]}",
            hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
        ) from error
    try:
        told: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ProbeFailed(
            f"python3 of base image {image} ended with {ended.status} and no answer",
            details=ended.stderr,
            hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
        ) from error
    name, version = told["libc"]
    if name != "glibc":
        raise BaseWithoutGlibc(
            f"base image {image} is not built on glibc",
            hint="torch and FlashInfer publish glibc (manylinux) wheels only; choose a Debian or Ubuntu base",
        )
    major, minor = (int(part) for part in version.split(".")[:2])
    complete = all(told["packages"][name] for name in ("torch", "flashinfer-python"))
    if not complete and not told.get("venv", True):
        raise BaseWithoutPython(
            f"python3 of base image {image} has no venv module", hint="install python3-venv in BASE_IMAGE"
        )
    facts = BaseFacts(
        image_id,
        told["python"],
        told["machine"],
        (major, minor),
        told["packages"],
        bool(told["compiler"]),
        told["cuda"],
    )
    return facts, read_gpus(told, offer)


def read_gpus(told: Mapping[str, Any], offer: Gpus) -> Gpus:
    """What nvidia-smi said inside the container; no GPUs where it is missing or failed."""
    rows = [row for row in told.get("gpus", ()) if len(row) == 6]
    gpus = tuple(
        Gpu(row[0], row[1], row[2], int(row[3]) if row[3].isdecimal() else 0, mig=row[5] == "Enabled") for row in rows
    )
    processes = tuple(
        f"process {row[1]} ({row[2]}) holds {row[3]} MiB" for row in told.get("processes", ()) if len(row) == 4
    )
    major, minor = told.get("driver_cuda") or (0, 0)
    cuda = (int(major), int(minor)) if major else None
    return Gpus(offer.access, offer.devices, rows[0][4] if rows else "", gpus, processes, cuda)
