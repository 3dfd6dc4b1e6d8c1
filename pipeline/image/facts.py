"""What the pipeline must know of a base image before it can choose wheels for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.contract.errors import BuildError, UsageError

if TYPE_CHECKING:
    from docker import DockerClient

# Runs with whatever Python the base has, so it keeps to what every Python 3 knows.
_PROBE = (
    "import json,platform,sys,sysconfig;"
    "print(json.dumps({'python':'%d.%d'%sys.version_info[:2],'machine':platform.machine(),"
    "'libc':platform.libc_ver(),'implementation':sys.implementation.name}))"
)


class BaseWithoutPython(UsageError):
    """The base image has no usable Python 3."""


class BaseWithoutGlibc(UsageError):
    """The base image is not built on glibc, for which the wheels are made."""


class ProbeFailed(BuildError):
    """A container of the base image did not start."""


@dataclass(frozen=True)
class BaseFacts:
    """`image_id` as the engine knows it; `python` such as `3.11`; `glibc` (major, minor); `machine` as uname says."""

    image_id: str
    python: str
    machine: str
    glibc: tuple[int, int]

    def platforms(self) -> tuple[str, ...]:
        """Wheel platform tags that this base accepts, newest first (PEP 600, and the three older aliases)."""
        major, minor = self.glibc
        tags = [f"manylinux_{major}_{n}_{self.machine}" for n in range(minor, 16, -1)]
        tags += [f"manylinux2014_{self.machine}"]
        if self.machine == "x86_64":
            tags += [f"manylinux_2_12_{self.machine}", f"manylinux2010_{self.machine}"]
            tags += [f"manylinux_2_5_{self.machine}", f"manylinux1_{self.machine}"]
        return (*tags, f"linux_{self.machine}")


def read_facts(client: DockerClient, image: str) -> BaseFacts:
    """Start one container of `image` without network and ask its Python; raise one of the errors above."""
    from docker.errors import APIError, ContainerError

    image_id = str(client.images.get(image).id)
    try:
        output = client.containers.run(
            image, ["-c", _PROBE], entrypoint="python3", network_mode="none", remove=True, stderr=False
        )
        told = json.loads(output)
    except (ContainerError, APIError, ValueError) as error:
        if "executable file not found" in str(error) or "no such file" in str(error).lower():
            raise BaseWithoutPython(
                f"base image {image} has no python3",
                hint="choose a BASE_IMAGE with Python 3, or leave BASE_IMAGE out",
            ) from error
        raise ProbeFailed(f"a container of base image {image} did not answer: {error}") from error
    name, version = told["libc"]
    if name != "glibc":
        raise BaseWithoutGlibc(
            f"base image {image} is not built on glibc",
            hint="torch and FlashInfer publish glibc (manylinux) wheels only; choose a Debian or Ubuntu base",
        )
    major, minor = (int(part) for part in version.split(".")[:2])
    return BaseFacts(image_id, told["python"], told["machine"], (major, minor))
