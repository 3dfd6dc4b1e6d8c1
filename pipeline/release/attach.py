"""What proves an image, attached to it: OCI artifacts whose `subject` is the image, found as its referrers.

    autotune manifest   one artifact per key: manifest.json as it lies beside the cache
    verdict             what a verify found, bound to the image's config digest
    SBOM                CycloneDX, where BuildKit's scanner could not be had

An artifact is a manifest of one blob and the empty config, as oras writes and reads them (OCI 1.1). It holds no time,
so that the same content attached twice is one artifact.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.digest import canonical_json, sha256_bytes
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.verdict import Verdict
from pipeline.image.labels import KEY, PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor, Manifest
from pipeline.registry.errors import InvalidResponse

from . import media
from .faults import AnnotationsLost

TITLE = "org.opencontainers.image.title"  # oras names the file by it
_LIMIT = 64 * 1024 * 1024  # bytes of an attached blob


@dataclass(frozen=True)
class Attachment:
    """One file to attach: artifact type, the blob's media type, bytes, file name, annotations of the artifact."""

    artifact_type: str
    media_type: str
    content: bytes = field(repr=False)
    title: str
    annotations: Mapping[str, str] = field(default_factory=dict)


def autotune(content: bytes) -> Attachment:
    """A key's manifest.json, gzipped: the sha256 of its own bytes is what the image's label names.

    It has a row for each entry: gzipped, a large one is a fifteenth of its size (seen). Raises `CacheRefused`.
    """
    key = AutotuneManifest.from_json(json.loads(content)).key
    packed = gzip.compress(content, mtime=0)
    return Attachment(media.AUTOTUNE, media.AUTOTUNE_GZIP, packed, "manifest.json.gz", {KEY: key})


def verdict(found: Verdict) -> Attachment:
    """A verdict. Two that say the same are one artifact."""
    notes = {KEY: found.key, f"{PREFIX}.level": found.level, f"{PREFIX}.result": found.result}
    return Attachment(media.VERDICT, media.VERDICT_JSON, canonical_json(found.to_json()), "verdict.json", notes)


def sbom(content: bytes) -> Attachment:
    """A CycloneDX SBOM as JSON."""
    return Attachment(media.CYCLONEDX, media.CYCLONEDX, content, "sbom.cdx.json")


def attach(
    registry: Registry, repository: str, subject: Descriptor, what: Sequence[Attachment]
) -> tuple[Descriptor, ...]:
    """Push attachments of `subject` and return what names them; nothing is pushed that is there already.

    What was pushed is read back: raises `AnnotationsLost` when the registry does not return its annotations or does not
    list it, and the errors of `Registry`.
    """
    made = [_artifact(registry, repository, subject, one) for one in what]
    known = {one.digest for one in registry.referrers(repository, subject.digest)}
    new = [one for one in made if one.digest not in known]
    for manifest in new:
        registry.put_manifest(repository, manifest)
    for one, manifest in zip(what, made, strict=True):
        check_annotations(registry, repository, manifest.digest, one.annotations)
    known |= {one.digest for one in registry.referrers(repository, subject.digest)} if new else set()
    lost = [one.title for one, manifest in zip(what, made, strict=True) if manifest.digest not in known]
    if lost:
        raise AnnotationsLost(
            f"{registry.name} took {lost[0]} of {repository} and does not list it among the image's referrers",
            hint="the registry must keep referrers (OCI 1.1), or let the tag sha256-<digest> be written",
        )
    return tuple(one.descriptor() for one in made)


def _artifact(registry: Registry, repository: str, subject: Descriptor, what: Attachment) -> Manifest:
    """Push the blobs of one attachment; its manifest, which is not pushed yet."""
    config = registry.put_blob(repository, b"{}", media.EMPTY)
    blob = registry.put_blob(repository, what.content, what.media_type)
    layer = {**blob.to_json(), "annotations": {TITLE: what.title}}
    value: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": media.MANIFEST,
        "artifactType": what.artifact_type,
        "config": config.to_json(),
        "layers": [layer],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    if what.annotations:
        value["annotations"] = dict(what.annotations)
    body = canonical_json(value)
    return Manifest(body, media.MANIFEST, f"sha256:{sha256_bytes(body)}")


def check_annotations(registry: Registry, repository: str, reference: str, expected: Mapping[str, str]) -> None:
    """Read a manifest or index back; raise `AnnotationsLost` unless it has all of `expected`.

    The classic image store drops annotations without a word; so may a registry or a proxy before it.
    """
    found = registry.manifest(repository, reference)
    have = (found.json().get("annotations") or {}) if found is not None else {}
    lost = [name for name, value in expected.items() if have.get(name) != value]
    if found is None or lost:
        raise AnnotationsLost(
            f"{registry.name}/{repository}: {reference} was pushed and "
            + (f"came back without {', '.join(lost)}" if found else "cannot be read back"),
            hint="push from an engine with the containerd store: `pipeline daemon up --store containerd`",
        )


def attached(registry: Registry, repository: str, digest: str, artifact_type: str) -> Iterator[tuple[Manifest, bytes]]:
    """Every attachment of one type: its manifest and the bytes of its blob, digests checked, unpacked.

    Raises `InvalidResponse` when one is no artifact of one blob.
    """
    for one in registry.referrers(repository, digest, artifact_type):
        found = registry.manifest(repository, one.digest)
        if found is None:
            raise InvalidResponse(f"{repository}@{one.digest} is listed as a referrer and is not there")
        layers = found.json().get("layers")
        if not isinstance(layers, list) or len(layers) != 1:
            raise InvalidResponse(f"{repository}@{one.digest} is not an artifact of one blob")
        layer = Descriptor.from_json(layers[0])
        body = registry.blob(repository, layer.digest, limit=_LIMIT)
        yield found, _unpacked(body) if layer.media_type.endswith("+gzip") else body


def _unpacked(body: bytes) -> bytes:
    """The content of a gzipped blob; what cannot be unpacked stays as it is, and is then no manifest of any label."""
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(body, _LIMIT)
    except zlib.error:
        return body
    return content if stream.eof else body
