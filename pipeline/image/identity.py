"""What an image is, whichever store holds it: its config digest, its layers, and what its last layer weighs.

The classic store names an image by its config digest and tells each layer's content size. The containerd store names
it by its manifest and tells the space on disk instead, so there (and with `deep`) the engine's export is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .saved import read_saved

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True)
class Identity:
    """`last_size`: bytes of the files in the last layer; `last_names`: those files. What was not read is None."""

    config_digest: str
    diff_ids: tuple[str, ...]
    last_size: int | None
    last_names: tuple[str, ...] | None


def identify(client: DockerClient, image: str, *, containerd_store: bool, deep: bool = False) -> Identity:
    """Identify an image that is in the engine; `deep` reads its whole export, which takes time with its size."""
    if containerd_store or deep:
        saved = read_saved(client, image)
        return Identity(saved.config_digest, saved.diff_ids, None, saved.last_layer)
    found = client.images.get(image)
    steps = [int(step["Size"]) for step in found.history() if "COPY" in step["CreatedBy"] or int(step["Size"])]
    layers = tuple(str(layer) for layer in found.attrs["RootFS"]["Layers"])
    return Identity(str(found.id), layers, steps[0] if steps else 0, None)
