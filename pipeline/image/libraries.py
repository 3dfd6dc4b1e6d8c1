"""The stage that tunes and the finished image stand on different bases: do both resolve the same libraries?

FlashInfer's numbers of tactics are places in lists that cuBLAS and cuDNN make, so both must load the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.errors import CacheRefused

from .gpus import Gpus
from .halves import Half, read_half

if TYPE_CHECKING:
    from docker import DockerClient

_PATIENCE = 300.0  # seconds; torch's libraries are gigabytes on a cold disk


class LibrariesDiffer(CacheRefused):
    """The finished image resolves other libraries than the stage that tuned: its cache would be ignored."""


def differing(tuned: Half, final: Half) -> list[str]:
    """A line for each field of the image half, each library's path and each size that is not the same in both."""
    pairs = ((tuned.fields, final.fields), (tuned.libraries, final.libraries), (tuned.sizes, final.sizes))
    return [
        f"{name}: tuned with {one.get(name, 'none')}, the image has {two.get(name, 'none')}"
        for one, two in pairs
        for name in sorted({*one, *two})
        if one.get(name) != two.get(name)
    ]


def check_same(client: DockerClient, tuner: str, final: str, gpus: Gpus) -> None:
    """Ask a container of each; raise `LibrariesDiffer` with the differing paths, or `HalfUnread`."""
    with log.step("compare the libraries of tuner and image"):
        tuned, served = (read_half(client, image, max_wait=_PATIENCE, gpus=gpus) for image in (tuner, final))
    lines = differing(tuned, served)
    if lines:
        raise LibrariesDiffer(
            f"{len(lines)} libraries or versions differ between the stage that tuned and the image: {lines[0]}",
            details=lines[:20],
            hint="COMPILER_IMAGE and BASE_IMAGE of versions.json must bring no cuBLAS and cuDNN of their own",
        )
