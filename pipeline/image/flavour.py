"""Which of the Dockerfiles builds the image, and which wheels go in.

overlay   the base brings torch and FlashInfer: nothing is installed
cpu       any base with Python: CPU wheels
cuda      any base with Python: CUDA from wheels, and a C++ compiler beside it for the stage that tunes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.errors import UsageError
from pipeline.versions import Versions

from . import base as bases
from .facts import BaseFacts
from .wheels import fill

if TYPE_CHECKING:
    from docker import DockerClient


class BaseIncomplete(UsageError):
    """A base that DEVICE=cuda cannot build on."""


@dataclass(frozen=True)
class Flavour:
    """A Dockerfile, the wheelhouses that it takes as named contexts with the digest of all, and further ARGs.

    `two_bases` says that the stage that tunes stands on another base than the finished image.
    """

    dockerfile: str
    houses: dict[str, Path] = field(default_factory=dict)
    digest: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    two_bases: bool = False


def flavour(
    client: DockerClient, base: bases.Base, facts: BaseFacts, *, device: str, wanted: str, versions: Versions,
    root: Path, home: Path, logfile: Path,
) -> Flavour:  # fmt: skip
    """Choose, and fill the wheelhouses. `wanted` is the user's BASE_IMAGE, empty where there is none."""
    if facts.complete:
        return Flavour("Dockerfile.overlay")
    requirements = root / "requirements"
    if device == "cpu":
        house = fill("image-cpu", requirements, facts, home, logfile)
        return Flavour("Dockerfile", {"wheels": house.path}, house.digest)
    if wanted and not facts.compiler:
        raise BaseIncomplete(
            f"{wanted} has neither torch and FlashInfer nor a C++ compiler to compile FlashInfer's modules with",
            hint="BASE_IMAGE=vllm/vllm-openai:<version>, or any image with both; or install g++ in yours; or leave "
            "BASE_IMAGE out",
        )
    compiler = bases.obtain_compiler(
        client, base, default=versions["COMPILER_IMAGE"], wanted=wanted, suite=versions["DEBIAN_SUITE"], home=home,
        logfile=logfile,
    )  # fmt: skip
    wheels = fill("image-cuda", requirements, facts, home, logfile)
    tools = fill("compiler-cuda", requirements, facts, home, logfile)
    return Flavour(
        "Dockerfile.cuda",
        {"wheels": wheels.path, "compiler": tools.path},
        f"{wheels.digest} {tools.digest} {compiler.image_id}",
        {"COMPILER_IMAGE": compiler.reference},
        two_bases=True,
    )
