"""An OCI layout that BuildKit filled: what an image in it is made of, from its index down to its blobs.

<cache home>/exports/run-…/    one for each run, locked by it, shared by its cells, removed with it
    blobs/sha256/<digest>
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.scratch import scratch
from pipeline.registry.descriptors import Descriptor, Manifest

from . import media
from .faults import ExportBroken

_KIND = "vnd.docker.reference.type"  # BuildKit's mark on the manifest of its attestations


@dataclass(frozen=True)
class Content:
    """An image in a layout: `top` is its index; `manifests` those below it, `blobs` their configs and layers, all of
    them before what names them; `config` is the image's own config digest.
    """

    layout: Path
    top: Descriptor
    manifests: tuple[Descriptor, ...]
    blobs: tuple[Descriptor, ...]
    image: Descriptor
    config: str

    def path(self, one: Descriptor) -> Path:
        """Where a blob or manifest lies."""
        return _blob(self.layout, one.digest)


@dataclass(frozen=True)
class OnDisk:
    """What an image in a layout is made of, read as from a registry."""

    content: Content

    def manifest(self, _repository: str, reference: str) -> Manifest | None:
        """The manifest or index of a digest that the image names."""
        known = {one.digest: one for one in (self.content.top, *self.content.manifests)}
        one = known.get(reference)
        return Manifest(self.content.path(one).read_bytes(), one.media_type, one.digest) if one is not None else None

    def blob(self, _repository: str, digest: str, *, limit: int = 0) -> bytes:  # noqa: ARG002 - a registry's is bounded
        """A blob's bytes."""
        return _blob(self.content.layout, digest).read_bytes()


@contextlib.contextmanager
def layout(home: Path) -> Iterator[Path]:
    """An empty layout for one run; those of runs that were killed, whose locks are gone, are removed."""
    folder = home / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    with scratch(folder, "run-") as made:
        yield made


def read_content(place: Path, digest: str) -> Content:
    """Read the index `digest` and what it names. Raise `ExportBroken` when it is not one image."""
    try:
        body = _blob(place, digest).read_bytes()
        top = Descriptor(str(json.loads(body)["mediaType"]), digest, len(body))
        entries = [Descriptor.from_json(entry) for entry in json.loads(body)["manifests"]]
        images = [entry for entry in entries if _KIND not in entry.annotations]
        if len(images) != 1 or top.media_type not in media.INDEXES:
            raise ExportBroken(f"BuildKit exported {len(images)} images, not one")
        blobs: dict[str, Descriptor] = {}
        config = ""
        for entry in entries:
            manifest: dict[str, Any] = json.loads(_blob(place, entry.digest).read_bytes())
            for value in (*manifest["layers"], manifest["config"]):
                one = Descriptor.from_json(value)
                blobs.setdefault(one.digest, one)
            if entry is images[0]:
                config = Descriptor.from_json(manifest["config"]).digest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportBroken(f"what BuildKit exported cannot be read: {error}") from error
    return Content(place, top, tuple(entries), tuple(blobs.values()), images[0], config)


def _blob(place: Path, digest: str) -> Path:
    return place / "blobs" / "sha256" / digest.removeprefix("sha256:")
