"""What an image is, whichever store holds it: its config digest, its layers, and what its last layers weigh.

The classic store names an image by its config digest and tells each layer's content size. The containerd store names
it by its manifest and tells the space on disk instead. There the engine is made to show manifest, configuration and the
last layers by a push to ourselves, where that can be; else its export is read (`Look`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.daemon.look import Look

from .peek import peek
from .saved import read_saved, saved_of

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True)
class Identity:
    """`sizes`: bytes of the files in each of the last layers; `names`: those files. What was not read is None."""

    config_digest: str
    diff_ids: tuple[str, ...]
    sizes: tuple[int, ...] | None
    names: tuple[tuple[str, ...] | None, ...] | None


_METADATA = ("USER ", "ENTRYPOINT ", "CMD ", "LABEL ", "ENV ", "WORKDIR ", "EXPOSE ", "ARG ", "VOLUME ", "STOPSIGNAL ")


def _says_nothing_but_metadata(step: Mapping[str, Any]) -> bool:
    """Whether a step of the history made no layer: one of BuildKit's own instructions that only change the config."""
    said = str(step.get("CreatedBy", ""))
    return str(step.get("Comment", "")).startswith("buildkit") and said.startswith(_METADATA) and not int(step["Size"])


def identify(client: DockerClient, image: str, *, count: int, look: Look) -> Identity:
    """Identify an image and its last `count` layers, topmost first. Where a push shows nothing, the export does."""
    if look is not Look.ASKED:
        small = peek(client, image, count=count) if look is Look.PUSHED else None
        saved = saved_of(small, image, count=count) if small else read_saved(client, image, count=count)
        return Identity(saved.config_digest, saved.diff_ids, None, saved.last)
    found = client.images.get(image)
    steps = [int(step["Size"]) for step in found.history() if not _says_nothing_but_metadata(step)]
    layers = tuple(str(layer) for layer in found.attrs["RootFS"]["Layers"])
    return Identity(str(found.id), layers, tuple(steps[:count]), None)
