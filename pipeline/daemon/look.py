"""How an engine can be made to show what an image consists of."""

from __future__ import annotations

from enum import StrEnum


class Look(StrEnum):
    """What is done to learn an image's config digest, and what its last layers hold."""

    ASKED = "asked"  # the classic store names images by their config digest, and tells how large each layer's files are
    PUSHED = (
        "pushed"  # the containerd store tells neither, but pushes manifest, configuration, last layers to ourselves
    )
    EXPORTED = "exported"  # any engine exports an image, which takes long for a large one
