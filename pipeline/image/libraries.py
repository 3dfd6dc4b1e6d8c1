"""The stage that tunes and the finished image stand on different bases: do both resolve the same CUDA libraries?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.errors import CacheRefused
from pipeline.contract.places import ENV_WORKSPACE

from .contain import Sandbox, run_to_end
from .gpus import Gpus

if TYPE_CHECKING:
    from docker import DockerClient

_PATIENCE = 300.0  # seconds; torch's libraries are gigabytes on a cold disk


class LibrariesDiffer(CacheRefused):
    """The finished image resolves other CUDA libraries than the stage that tuned: its cache would be ignored."""


class LibrariesUnknown(CacheRefused):
    """An image does not say which libraries it resolves."""


def differing(tuned: Mapping[str, Any], final: Mapping[str, Any]) -> list[str]:
    """A line for each library and each version of the image half that is not the same in both."""
    lines = []
    for part in ("image_half", "libraries"):
        one, two = tuned.get(part, {}), final.get(part, {})
        lines += [
            f"{name}: tuned with {one.get(name, 'none')}, the image has {two.get(name, 'none')}"
            for name in sorted({*one, *two})
            if one.get(name) != two.get(name)
        ]
    return lines


def check_same(client: DockerClient, tuner: str, final: str, gpus: Gpus) -> None:
    """Ask a container of each; raise `LibrariesDiffer` with the differing paths."""
    with log.step("compare the CUDA libraries of tuner and image"):
        lines = differing(_ask(client, tuner, gpus), _ask(client, final, gpus))
    if lines:
        raise LibrariesDiffer(
            f"{len(lines)} libraries or versions differ between the stage that tuned and the image: {lines[0]}",
            details=lines[:20],
            hint="COMPILER_IMAGE and BASE_IMAGE of versions.json must bring no cuBLAS and cuDNN of their own",
        )


def _ask(client: DockerClient, image: str, gpus: Gpus) -> dict[str, Any]:
    sandbox = Sandbox(user="0:0", environment={ENV_WORKSPACE: "/tmp/workspace"}, gpus=gpus)  # noqa: S108 - in the container
    ended = run_to_end(client, image, ["python3", "-m", "pipeline.tune.libraries"], sandbox, max_wait=_PATIENCE)
    try:
        told: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise LibrariesUnknown(
            f"{image} does not say which CUDA libraries it loads: it ended with {ended.status}", details=ended.stderr
        ) from error
    return told
