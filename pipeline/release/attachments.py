"""What proves an image, attached to it: OCI artifacts whose `subject` is the image's manifest.

    autotune manifest   one artifact for each key: manifest.json as it lies beside the cache
    server manifest     of what a server's start made: its words, versions, phases and caches
    verdict             what a verify found
    SBOM                CycloneDX, what is installed in it

An artifact is a manifest of one blob and the empty config, as oras writes and reads them (OCI 1.1). It holds no time,
so that the same content attached twice is one artifact.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.contract.digest import canonical_json
from pipeline.contract.errors import PublishError
from pipeline.contract.manifest import Manifest as AutotuneManifest
from pipeline.contract.text import shown
from pipeline.contract.verdict import Verdict
from pipeline.image.names import KEY, PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import EMPTY, MANIFEST, Descriptor, Manifest
from pipeline.registry.errors import InvalidResponse, NotFound

from .images import Image, untrusted

# Artifact types; each blob has the media type beside it.
AUTOTUNE = "application/vnd.tuned-image-pipeline.autotune.manifest.v1"
AUTOTUNE_GZIP = f"{AUTOTUNE}.json+gzip"
SERVER = "application/vnd.tuned-image-pipeline.server.manifest.v1"
SERVER_GZIP = f"{SERVER}.json+gzip"
VERDICT = "application/vnd.tuned-image-pipeline.verdict.v1"
VERDICT_JSON = f"{VERDICT}+json"
CYCLONEDX = "application/vnd.cyclonedx+json"  # as registered with IANA
TITLE = "org.opencontainers.image.title"  # oras names the file by it
_LIMIT = 64 << 20  # bytes of an attached blob, unpacked


@dataclass(frozen=True)
class Attachment:
    """One file to attach: artifact type, the blob's media type, bytes, file name, annotations of the artifact.

    `bound`: the image's own label names its content, so that the image's signature covers it.
    """

    artifact_type: str
    media_type: str
    content: bytes = field(repr=False)
    title: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    bound: bool = False


@dataclass(frozen=True)
class Attached:
    """An attachment that was found: its manifest and content, or why it does not count."""

    digest: str
    content: bytes = field(repr=False, default=b"")
    problem: str = ""


def autotune(content: bytes) -> Attachment:
    """A key's manifest.json, gzipped (it has a row for each entry). Raises `CacheRefused`."""
    key = AutotuneManifest.from_json(json.loads(content)).key
    packed = gzip.compress(content, mtime=0)
    return Attachment(AUTOTUNE, AUTOTUNE_GZIP, packed, "manifest.json.gz", {KEY: key}, bound=True)


def server(content: bytes) -> Attachment:
    """What an image says of the server's start that it was warmed up with."""
    return Attachment(SERVER, SERVER_GZIP, gzip.compress(content, mtime=0), "manifest.json.gz")


def verdict(found: Verdict) -> Attachment:
    """A verdict. Two that say the same are one artifact."""
    notes = {KEY: found.key, f"{PREFIX}.level": found.level, f"{PREFIX}.result": found.result}
    return Attachment(VERDICT, VERDICT_JSON, canonical_json(found.to_json()), "verdict.json", notes)


def sbom(content: bytes) -> Attachment:
    """A CycloneDX SBOM as JSON."""
    return Attachment(CYCLONEDX, CYCLONEDX, content, "sbom.cdx.json")


def needed(image: Image) -> set[str]:
    """The types of what must be attached to an image beside its SBOM."""
    return {VERDICT} | ({SERVER} if image.server else set()) | ({AUTOTUNE} if image.keys else set())


def attach(
    registry: Registry, repository: str, subject: Descriptor, items: Sequence[Attachment]
) -> tuple[tuple[str, ...], bool]:
    """Push attachments of `subject`; return their digests, and whether any was new.

    What was pushed is read back: raises `PublishError` when the registry does not return its annotations or does not
    list it among the referrers.
    """
    made = [_artifact(registry, repository, subject, one) for one in items]
    known = {one.digest for one in registry.referrers(repository, subject.digest)}
    new = [manifest for manifest in made if manifest.digest not in known]
    for manifest in new:
        registry.put_manifest(repository, manifest)
    listed = {one.digest for one in registry.referrers(repository, subject.digest)} if new else known
    for item, manifest in zip(items, made, strict=True):
        if manifest.digest not in listed:
            raise PublishError(
                f"{registry.name} took {item.title} and does not list it among the referrers of {repository}",
                hint="the registry must keep referrers (OCI 1.1), or let the tag sha256-<digest> be written",
            )
        if manifest in new:
            check_annotations(registry, repository, manifest.digest, item.annotations)
    return tuple(manifest.digest for manifest in made), bool(new)


def _artifact(registry: Registry, repository: str, subject: Descriptor, item: Attachment) -> Manifest:
    """Push the blobs of one attachment; its manifest, which is not pushed yet."""
    config = registry.put_blob(repository, b"{}", EMPTY)
    blob = registry.put_blob(repository, item.content, item.media_type)
    value: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": item.artifact_type,
        "config": config.to_json(),
        "layers": [{**blob.to_json(), "annotations": {TITLE: item.title}}],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    if item.annotations:
        value["annotations"] = dict(item.annotations)
    return Manifest.of(canonical_json(value))


def check_annotations(registry: Registry, repository: str, digest: str, expected: Mapping[str, str]) -> None:
    """Read a manifest back; raise `PublishError` unless it has all of `expected`: some drop annotations silently."""
    found = registry.manifest(repository, digest)
    have = found.annotations() if found is not None else {}
    lost = [name for name, value in expected.items() if have.get(name) != value]
    if found is None or lost:
        raise PublishError(
            f"{registry.name}/{repository}: {digest[:19]}… was pushed and "
            + (f"came back without {', '.join(lost)}" if found else "cannot be read back"),
            hint="the registry, or a proxy before it, changes manifests",
        )


def attached(registry: Registry, repository: str, digest: str, artifact_type: str) -> Iterator[Attached]:
    """Every attachment of one type of the image manifest `digest`. Anyone who may push can make one, so that one that
    cannot be read has its `problem` and spoils no other.
    """
    for one in registry.referrers(repository, digest, artifact_type):
        try:
            with untrusted(f"attachment {one.digest[:19]}…"):
                yield Attached(one.digest, _content(registry, repository, digest, one.digest))
        except (InvalidResponse, NotFound) as error:
            yield Attached(one.digest, problem=error.message)


def _content(registry: Registry, repository: str, digest: str, listed: str) -> bytes:
    found = registry.manifest(repository, listed)
    if found is None:
        raise InvalidResponse("it is listed as a referrer and is not there")
    subject = found.json().get("subject")
    named = subject.get("digest") if isinstance(subject, dict) else None
    if named != digest:  # the list of an older registry is a tag that anyone who may push can write
        raise InvalidResponse(f"it is of {shown(str(named), 80)}")
    layers = found.entries("layers")
    if len(layers) != 1:
        raise InvalidResponse("it is not an artifact of one blob")
    body = registry.blob(repository, layers[0].digest, limit=_LIMIT)
    return _unpacked(body) if layers[0].media_type.endswith("+gzip") else body


def _unpacked(body: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(body, _LIMIT)
    except zlib.error as error:
        raise InvalidResponse("it is not gzip") from error
    if not stream.eof:
        raise InvalidResponse("it is cut short, or too large")
    return content
