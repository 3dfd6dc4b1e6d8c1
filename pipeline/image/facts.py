"""What the pipeline must know of a base image: its Python, its C library, what is installed, and the GPUs it sees."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import PipelineError, UsageError

from .contain import Sandbox, run_to_end
from .gpus import Gpu, Gpus
from .refusals import BaseWithoutPython, ProbeFailed, refusal

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
OLDEST_PYTHON = (3, 11)  # which /opt/pipeline is written for


class BaseWithoutGlibc(UsageError):
    """The base image is not built on glibc, for which the wheels are made."""


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
        raise refusal(image, offer, str(error.explanation or error)) from error
    try:
        told: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ProbeFailed(
            f"python3 of base image {image} ended with {ended.status} and no answer",
            details=ended.stderr,
            hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
        ) from error
    if tuple(int(part) for part in told["python"].split(".")) < OLDEST_PYTHON:
        raise BaseWithoutPython(
            f"python3 of base image {image} is {told['python']}; "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer is needed",
            hint="choose a BASE_IMAGE with a newer Python, or leave BASE_IMAGE out",
        )
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
    gpus = read_gpus(told, offer)
    if any(gpu.busy for gpu in gpus.gpus):
        gpus = replace(gpus, processes=_processes(client, image, offer) or gpus.processes)
    return facts, gpus


def _processes(client: DockerClient, image: str, offer: Gpus) -> tuple[str, ...]:
    """Who holds memory on the GPUs, asked among the host's processes; nothing where the engine does not allow that.

    The driver knows no PID namespace: in one, nvidia-smi names no process (NVIDIA/nvidia-docker#179).
    """
    from docker.errors import APIError

    words = [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(APIError, PipelineError):
        ended = run_to_end(client, image, words, Sandbox(gpus=offer, host_pids=True), max_wait=_PATIENCE)
        if ended.status == 0:
            rows = [[word.strip() for word in line.split(",")] for line in ended.stdout.splitlines()]
            return _named(rows)
    return ()


def _named(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"process {row[1]} ({row[2]}) holds {row[3]} MiB" for row in rows if len(row) == 4)


def read_gpus(told: Mapping[str, Any], offer: Gpus) -> Gpus:
    """What nvidia-smi said inside the container; no GPUs where it is missing or failed."""
    rows = [row for row in told.get("gpus", ()) if len(row) == 6]
    gpus = tuple(
        Gpu(row[0], row[1], row[2], int(row[3]) if row[3].isdecimal() else 0, mig=row[5] == "Enabled") for row in rows
    )
    processes = _named(told.get("processes", ()))
    major, minor = told.get("driver_cuda") or (0, 0)
    cuda = (int(major), int(minor)) if major else None
    return Gpus(offer.access, offer.devices, rows[0][4] if rows else "", gpus, processes, cuda)
