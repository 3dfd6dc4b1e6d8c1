"""An image as a registry holds it: what its name leads to, manifests, configs, and BuildKit's attestations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.contract.text import shown
from pipeline.registry.descriptors import Descriptor, Manifest
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import media

# BuildKit's attestation storage: a manifest beside the image in the index, each layer one in-toto statement.
_PREDICATE = "in-toto.io/predicate-type"
_STATEMENT_LIMIT = 64 * 1024 * 1024  # bytes


class Source(Protocol):
    """What holds manifests and blobs: a `Registry`, or a layout on disk."""

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest of a tag or digest."""

    def blob(self, repository: str, digest: str, *, limit: int = ...) -> bytes:
        """A blob's bytes."""


@dataclass(frozen=True)
class Image:
    """One image of one platform: its manifest, the config's digest and content, BuildKit's attestations by their index
    entries, and its annotations with those that the index has of it.
    """

    manifest: Manifest
    config_digest: str
    config: Mapping[str, Any]
    annotations: Mapping[str, str]
    attestations: tuple[Descriptor, ...]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its config."""
        inner = self.config.get("config")
        labels = inner.get("Labels") if isinstance(inner, dict) else None
        return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """Digests of its layers' contents, the lowest first."""
        root = self.config.get("rootfs")
        ids = root.get("diff_ids") if isinstance(root, dict) else None
        return tuple(map(str, ids)) if isinstance(ids, list) else ()


@dataclass(frozen=True)
class Pushed:
    """What a name in a registry leads to: `top` is what its digest names, an index or a manifest."""

    reference: Reference
    top: Manifest
    images: tuple[Image, ...]

    @property
    def digest(self) -> str:
        """The digest that signatures and attachments are of."""
        return self.top.digest


def read_image(registry: Source, reference: Reference) -> Pushed:
    """Read an image's manifests and configs. Raises `NotFound`, `InvalidResponse` where it is no image."""
    top = registry.manifest(reference.repository, reference.target)
    if top is None:
        raise NotFound(f"there is no {reference}", hint="check the name; `skopeo list-tags` lists what there is")
    if top.media_type not in media.INDEXES:
        return Pushed(reference, top, (_image(registry, reference, top, {}, ()),))
    value = top.json()
    entries = [Descriptor.from_json(entry) for entry in value.get("manifests") or ()]
    images = []
    for entry in entries:
        if entry.annotations.get(media.ATTESTATION_KIND):
            continue
        found = registry.manifest(reference.repository, entry.digest)
        if found is None:
            raise InvalidResponse(f"{reference} lists {entry.digest}, which is not there")
        beside = tuple(e for e in entries if e.annotations.get(media.ATTESTATION_OF) == entry.digest)
        images.append(_image(registry, reference, found, {**_notes(value), **entry.annotations}, beside))
    return Pushed(reference, top, tuple(images))


def statements(registry: Source, reference: Reference, image: Image) -> dict[str, dict[str, Any]]:
    """The in-toto statements that BuildKit attached to an image, by predicate type. Raises `InvalidResponse`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in image.attestations:
        manifest = registry.manifest(reference.repository, entry.digest)
        if manifest is None:
            raise InvalidResponse(f"{reference} lists the attestation {entry.digest}, which is not there")
        for layer in map(Descriptor.from_json, manifest.json().get("layers") or ()):
            body = registry.blob(reference.repository, layer.digest, limit=_STATEMENT_LIMIT)
            found[layer.annotations.get(_PREDICATE, "")] = _object(body, f"attestation {layer.digest}")
    return found


def _image(
    registry: Source,
    reference: Reference,
    manifest: Manifest,
    notes: Mapping[str, str],
    beside: tuple[Descriptor, ...],
) -> Image:
    value = manifest.json()
    config = Descriptor.from_json(value.get("config"))
    content = _object(registry.blob(reference.repository, config.digest), f"the config of {reference}")
    return Image(manifest, config.digest, content, {**notes, **_notes(value)}, beside)


def _notes(value: Mapping[str, Any]) -> dict[str, str]:
    notes = value.get("annotations")
    return {str(k): str(v) for k, v in notes.items()} if isinstance(notes, dict) else {}


def _object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(f"{shown(what)} is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidResponse(f"{shown(what)} is not a JSON object")
    return value
