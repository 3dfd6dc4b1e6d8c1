"""What proves an image, attached to it: OCI artifacts whose `subject` is the image, found as its referrers.

    autotune manifest   one artifact per key: manifest.json as it lies beside the cache
    verdict             what a verify found, bound to the image's config digest
    SBOM                CycloneDX, where BuildKit's scanner could not be had

An artifact is a manifest of one blob and the empty config, as oras writes and reads them (OCI 1.1). It holds no time,
so that the same content attached twice is one artifact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.digest import canonical_json, sha256_bytes
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.verdict import Verdict
from pipeline.image.labels import KEY, PREFIX

from . import media
from .descriptors import Descriptor, Manifest
from .errors import AnnotationsLost, AnswerInvalid
from .registry import Registry

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
    """A key's manifest.json, byte for byte: its sha256 is what the image's label names. Raises `CacheRefused`."""
    import json

    key = AutotuneManifest.from_json(json.loads(content)).key
    return Attachment(media.AUTOTUNE, media.AUTOTUNE_JSON, content, "manifest.json", {KEY: key})


def verdict(found: Verdict) -> Attachment:
    """A verdict. Two that say the same are one artifact."""
    notes = {KEY: found.key, f"{PREFIX}.level": found.level, f"{PREFIX}.result": found.result}
    return Attachment(media.VERDICT, media.VERDICT_JSON, canonical_json(found.to_json()), "verdict.json", notes)


def sbom(content: bytes) -> Attachment:
    """A CycloneDX SBOM as JSON."""
    return Attachment(media.CYCLONEDX, media.CYCLONEDX, content, "sbom.cdx.json")


def attach(registry: Registry, repository: str, subject: Descriptor, what: Attachment) -> Descriptor:
    """Push an attachment of `subject` and return what names it; nothing is pushed that is there already.

    What was pushed is read back: raises `AnnotationsLost` when the registry does not return its annotations or does not
    list it, and the errors of `Registry`.
    """
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
    made = Manifest(body, media.MANIFEST, f"sha256:{sha256_bytes(body)}").descriptor()
    if made.digest not in {one.digest for one in registry.referrers(repository, subject.digest)}:
        registry.put_manifest(repository, made.digest, body, media.MANIFEST)
    check_annotations(registry, repository, made.digest, what.annotations)
    if made.digest not in {one.digest for one in registry.referrers(repository, subject.digest)}:
        raise AnnotationsLost(
            f"{registry.host} took {what.title} of {repository} and does not list it among the image's referrers",
            hint="the registry must keep referrers (OCI 1.1), or let the tag sha256-<digest> be written",
        )
    return made


def check_annotations(registry: Registry, repository: str, reference: str, expected: Mapping[str, str]) -> None:
    """Read a manifest or index back; raise `AnnotationsLost` unless it has all of `expected`.

    The classic image store drops annotations without a word; so may a registry or a proxy before it.
    """
    found = registry.manifest(repository, reference)
    have = (found.json().get("annotations") or {}) if found is not None else {}
    lost = [name for name, value in expected.items() if have.get(name) != value]
    if found is None or lost:
        raise AnnotationsLost(
            f"{registry.host}/{repository}: {reference} was pushed and "
            + (f"came back without {', '.join(lost)}" if found else "cannot be read back"),
            hint="push from an engine with the containerd store: `pipeline engine up --store containerd`",
        )


def attached(registry: Registry, repository: str, digest: str, artifact_type: str) -> Iterator[tuple[Manifest, bytes]]:
    """Every attachment of one type: its manifest and the bytes of its blob, digests checked.

    Raises `AnswerInvalid` when one is no artifact of one blob.
    """
    for one in registry.referrers(repository, digest, artifact_type):
        found = registry.manifest(repository, one.digest)
        if found is None:
            raise AnswerInvalid(f"{repository}@{one.digest} is listed as a referrer and is not there")
        layers = found.json().get("layers")
        if not isinstance(layers, list) or len(layers) != 1:
            raise AnswerInvalid(f"{repository}@{one.digest} is not an artifact of one blob")
        yield found, registry.blob(repository, Descriptor.from_json(layers[0]).digest, limit=_LIMIT)
