"""What the pipeline must know of a base image: its Python and C library, what is installed, its GPUs, its folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError, PipelineError, UsageError
from pipeline.contract.files import write_json
from pipeline.contract.processor import count_processors, parse_cpuinfo

from .base import Base
from .containers import ContainerSpec, run_one
from .contexts import Destination
from .gpus import Gpu, Gpus, refused_by_engine
from .session import Session

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
def folder(name):
    try:
        return os.path.realpath(os.path.dirname(importlib.util.find_spec(name).origin))
    except (AttributeError, OSError, TypeError):
        return ""
def torch_cuda():
    try:
        with open(os.path.join(folder("torch"), "version.py")) as file:
            found = re.search(r"^cuda[^=]*= *'([0-9.]+)'", file.read(), re.M)
    except OSError:
        found = None
    return found.group(1) if found else ""
with open("/proc/self/mountinfo") as file:
    mounts = [line.split()[4] for line in file]
with open("/proc/cpuinfo") as file:
    cpuinfo = file.read()
print(json.dumps({
    "driver_cuda": driver_cuda(), "cuda": torch_cuda(), "flashinfer": folder("flashinfer"), "mounts": mounts,
    "python": "%d.%d" % sys.version_info[:2], "machine": platform.machine(), "libc": platform.libc_ver(),
    "venv": importlib.util.find_spec("venv") is not None, "compiler": shutil.which("c++") is not None,
    "packages": {n: version(n) for n in ("torch", "flashinfer-python", "vllm", "sglang")}, "cpuinfo": cpuinfo,
    "gpus": smi("--query-gpu=name,uuid,compute_cap,memory.used,driver_version,mig.mode.current"),
}))
"""

# For each path: where it lies without symbolic links, and the directories above it that exist.
_PLACES = r"""
import json, os, sys
def place(path):
    real, found = os.path.realpath(path), []
    parts = real.strip("/").split("/")[:-1]
    for at in range(1, len(parts) + 1):
        above = "/" + "/".join(parts[:at])
        if os.path.isdir(above):
            s = os.stat(above)
            found.append([above, s.st_mode & 0o7777, s.st_uid, s.st_gid])
    return [real, found]
print(json.dumps({path: place(path) for path in sys.argv[1:]}))
"""

_TIMEOUT = 120.0  # seconds that a probe may take
_SCHEMA = 5  # of remembered answers
OLDEST_PYTHON = (3, 11)  # which what we ship is written for


@dataclass(frozen=True)
class BaseFacts:
    """`python` such as `3.11`; `glibc` (major, minor); `machine` as uname says.

    `packages` holds the versions that the base brings, empty text where it has none; `compiler` says whether it has a
    C++ compiler, `cuda` for which CUDA its torch is built, `flashinfer` where that package lies. `mounts` are the mount
    points of the container that was asked. `processor` holds model, flags and count of the engine's host.
    """

    python: str
    machine: str
    glibc: tuple[int, int]
    packages: Mapping[str, str] = field(default_factory=dict)
    compiler: bool = False
    cuda: str = ""
    flashinfer: str = ""
    mounts: tuple[str, ...] = ()
    processor: Mapping[str, Any] = field(default_factory=dict)

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

    def hidden(self, path: str) -> str:
        """The mount that hides what is baked at `path`; empty where none does."""
        above = [one for one in self.mounts if one != "/" and (path == one or path.startswith(f"{one.rstrip('/')}/"))]
        return above[0] if above else ""


def probe(session: Session, base: Base, offer: Gpus) -> tuple[BaseFacts, Gpus]:
    """Ask one container of `base`, with the GPUs on offer. Without GPUs the answer is remembered by the base's id."""
    place = session.home / "base" / f"{base.image_id.replace(':', '-')}-{_SCHEMA}-{_where(session)}.json"
    if offer.access == "none" and place.is_file():
        value = json.loads(place.read_text(encoding="utf-8"))
        return BaseFacts(**{**value, "glibc": tuple(value["glibc"]), "mounts": tuple(value["mounts"])}), offer
    facts, gpus = _probe(session.client, base.reference, offer)
    if offer.access == "none":
        write_json(place, asdict(facts))
    return facts, gpus


def _where(session: Session) -> str:
    """The engine's host, whose processor the answer names, in a few digits."""
    return sha256_json([session.engine.host, session.engine.name])[:8]


def _probe(client: DockerClient, image: str, offer: Gpus) -> tuple[BaseFacts, Gpus]:
    from docker.errors import APIError

    try:
        ended = run_one(client, image, ["python3", "-c", _PROBE], ContainerSpec(gpus=offer), timeout=_TIMEOUT)
    except APIError as error:
        raise _refusal(image, offer, str(error.explanation or error)) from error
    try:
        found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise BuildError(
            f"python3 of base image {image} ended with {ended.status} and no answer",
            details=ended.stderr,
            hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
        ) from error
    if tuple(int(part) for part in found["python"].split(".")) < OLDEST_PYTHON:
        raise UsageError(
            f"python3 of base image {image} is {found['python']}; "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer is needed",
            hint="choose a BASE_IMAGE with a newer Python, or leave BASE_IMAGE out",
        )
    name, version = found["libc"]
    if name != "glibc":
        raise UsageError(
            f"base image {image} is not built on glibc",
            hint="torch and FlashInfer publish glibc (manylinux) wheels only; choose a Debian or Ubuntu base",
        )
    if not all(found["packages"][name] for name in ("torch", "flashinfer-python")) and not found["venv"]:
        raise UsageError(f"python3 of base image {image} has no venv module", hint="install python3-venv in BASE_IMAGE")
    major, minor = (int(part) for part in version.split(".")[:2])
    facts = BaseFacts(
        python=found["python"],
        machine=found["machine"],
        glibc=(major, minor),
        packages=found["packages"],
        compiler=bool(found["compiler"]),
        cuda=found["cuda"],
        flashinfer=found["flashinfer"],
        mounts=tuple(found["mounts"]),
        processor={**parse_cpuinfo(found["cpuinfo"]), "count": count_processors(found["cpuinfo"])},
    )
    return facts, read_gpus(found, offer)


def read_gpus(found: Mapping[str, Any], offer: Gpus) -> Gpus:
    """What nvidia-smi said inside the container; no GPUs where it is missing or failed."""
    rows = [row for row in found.get("gpus", ()) if len(row) == 6]
    gpus = tuple(
        Gpu(row[0], row[1], row[2], int(row[3]) if row[3].isdecimal() else 0, mig=row[5] == "Enabled") for row in rows
    )
    major, minor = found.get("driver_cuda") or (0, 0)
    cuda = (int(major), int(minor)) if major else None
    return replace(offer, driver=rows[0][4] if rows else "", gpus=gpus, cuda=cuda)


def _refusal(image: str, offer: Gpus, said: str) -> PipelineError:
    """The error for what the engine said when a container of `image` did not start."""
    of_gpus = refused_by_engine(image, offer, said)
    if of_gpus is not None:
        return of_gpus
    if "not found" in said or "no such file" in said.lower():
        return UsageError(
            f"base image {image} has no python3", hint="choose a BASE_IMAGE with Python 3, or leave BASE_IMAGE out"
        )
    return BuildError(
        f"a container of base image {image} did not start: {said[:200]}",
        hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
    )


def destinations(session: Session, base: Base, paths: Sequence[str]) -> dict[str, Destination]:
    """Where paths of the image lie in the base; remembered by the base's id."""
    wanted = sorted(set(paths))
    digest = sha256_json([_SCHEMA, base.image_id, wanted])[:32]
    place = session.home / "base" / f"places-{digest}.json"
    if place.is_file():
        found = json.loads(place.read_text(encoding="utf-8"))
    else:
        words = ["python3", "-c", _PLACES, *wanted]
        ended = run_one(session.client, base.reference, words, ContainerSpec(user="0:0"), timeout=_TIMEOUT)
        try:
            found = json.loads(ended.stdout)
        except ValueError as error:
            raise BuildError(
                f"a container of {base.reference} did not say where {wanted[0]} lies", details=ended.stderr
            ) from error
        write_json(place, found)
    return {
        path: Destination(real, tuple((p, mode, uid, gid) for p, mode, uid, gid in parents))
        for path, (real, parents) in found.items()
    }
