"""An image as a registry has it: manifests, configs, and BuildKit's attestations.

Everything here may have been written by anyone who may push: `untrusted` turns whatever shape it has into one error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.digest import image_identity
from pipeline.image.names import KEY, PRODUCER
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import INDEXES, Descriptor, Manifest, json_object
from pipeline.registry.errors import InvalidResponse, NotFound

# BuildKit's marks on the index entry of an image's attestations.
ATTESTATION_KIND = "vnd.docker.reference.type"
ATTESTATION_OF = "vnd.docker.reference.digest"
_PREDICATE = "in-toto.io/predicate-type"
_STATEMENT_LIMIT = 64 << 20  # bytes
_SHAPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError)


@contextlib.contextmanager
def untrusted(what: str) -> Iterator[None]:
    """Read what anyone may have written: whatever shape it has, raise `InvalidResponse` and no other."""
    try:
        yield
    except _SHAPE as error:
        raise InvalidResponse(f"{what} does not have the expected shape") from error


@dataclass(frozen=True)
class Image:
    """One image of one platform: its index entry, its manifest, the config's digest and content, the index entries of
    BuildKit's attestations, and its annotations with those that the index has of it.
    """

    entry: Descriptor
    manifest: Manifest
    config_digest: str
    config: Mapping[str, Any]
    annotations: Mapping[str, str]
    attestations: tuple[Descriptor, ...]

    @property
    def digest(self) -> str:
        """The digest of its manifest, which attachments have as their subject."""
        return self.manifest.digest

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its config."""
        inner = self.config.get("config")
        labels = inner.get("Labels") if isinstance(inner, dict) else None
        return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}

    @property
    def identity(self) -> str:
        """What verdicts are bound to."""
        inner = self.config.get("config")
        return image_identity(self.diff_ids, inner if isinstance(inner, dict) else {})

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """Digests of its layers' contents, the lowest first."""
        root = self.config.get("rootfs")
        ids = root.get("diff_ids") if isinstance(root, dict) else None
        return tuple(map(str, ids)) if isinstance(ids, list) else ()

    @property
    def server(self) -> str:
        """The server whose start made its caches; empty where FlashInfer's tuner did."""
        made = self.labels.get(PRODUCER, "tune")
        return "" if made == "tune" else made

    @property
    def keys(self) -> tuple[str, ...]:
        """FlashInfer's keys that were baked; none where a server's start made the caches."""
        return () if self.server else self.listed(KEY)

    def listed(self, label: str) -> tuple[str, ...]:
        """The parts of a label that separates them by commas."""
        return tuple(part for part in self.labels.get(label, "").split(",") if part)


@dataclass(frozen=True)
class ImageIndex:
    """What a name leads to: `top` is an index or a manifest, and is what is signed; `images` one for each platform."""

    top: Manifest
    images: tuple[Image, ...]

    @property
    def digest(self) -> str:
        """The digest that is signed."""
        return self.top.digest


def read_image(registry: Registry, repository: str, reference: str) -> ImageIndex:
    """Read an image by tag or digest. Raises `NotFound`, or `InvalidResponse` where it is no image."""
    with untrusted(f"{repository} {reference}"):
        top = registry.manifest(repository, reference)
        if top is None:
            raise NotFound(f"there is no {reference} in {repository}", hint="`skopeo list-tags` lists what there is")
        if top.media_type not in INDEXES:
            return ImageIndex(top, (_image(registry, repository, top.descriptor(), top, notes={}, beside=()),))
        entries = top.entries("manifests")
        images = []
        for entry in entries:
            if entry.annotations.get(ATTESTATION_KIND):
                continue
            found = registry.manifest(repository, entry.digest)
            if found is None:
                raise InvalidResponse(f"{repository} {reference} lists {entry.digest}, which is not there")
            beside = tuple(e for e in entries if e.annotations.get(ATTESTATION_OF) == entry.digest)
            notes = {**top.annotations(), **entry.annotations}
            images.append(_image(registry, repository, entry, found, notes=notes, beside=beside))
        return ImageIndex(top, tuple(images))


def statements(registry: Registry, repository: str, image: Image) -> dict[str, dict[str, Any]]:
    """The in-toto statements that BuildKit attached to an image, by predicate type. Raises `InvalidResponse`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in image.attestations:
        manifest = registry.manifest(repository, entry.digest)
        if manifest is None:
            raise InvalidResponse(f"the attestation {entry.digest} is listed and not there")
        for layer in manifest.entries("layers"):
            body = registry.blob(repository, layer.digest, limit=_STATEMENT_LIMIT)
            found[layer.annotations.get(_PREDICATE, "")] = json_object(body, f"attestation {layer.digest}")
    return found


def _image(
    registry: Registry,
    repository: str,
    entry: Descriptor,
    manifest: Manifest,
    *,
    notes: Mapping[str, str],
    beside: tuple[Descriptor, ...],
) -> Image:
    config = Descriptor.from_json(manifest.json().get("config"))
    content = json_object(registry.blob(repository, config.digest), f"config {config.digest}")
    return Image(entry, manifest, config.digest, content, {**notes, **manifest.annotations()}, beside)
