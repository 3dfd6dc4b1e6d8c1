"""Descriptors, manifests and media types of the OCI image specification."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.text import shown

from .errors import InvalidResponse
from .reference import is_digest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"  # the config of an artifact: the two bytes `{}`
OCTETS = "application/octet-stream"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS = (MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
INDEXES = (INDEX, DOCKER_INDEX)


@dataclass(frozen=True)
class Descriptor:
    """What names a blob or a manifest: media type, digest, size in bytes, and what an index adds."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(content: bytes, media_type: str) -> Descriptor:
        """The descriptor of these bytes."""
        return Descriptor(media_type, f"sha256:{sha256_bytes(content)}", len(content))

    def to_json(self) -> dict[str, Any]:
        """The descriptor as OCI writes it; empty parts are left out."""
        more = {
            "artifactType": self.artifact_type,
            "annotations": dict(self.annotations),
            "platform": dict(self.platform),
        }
        base = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return {**base, **{name: value for name, value in more.items() if value}}

    @staticmethod
    def from_json(value: object) -> Descriptor:
        """Read a descriptor; raise `InvalidResponse` when it is none."""
        try:
            assert isinstance(value, dict)
            made = Descriptor(
                str(value["mediaType"]),
                str(value["digest"]),
                int(value["size"]),
                str(value.get("artifactType") or ""),
                {str(k): str(v) for k, v in (value.get("annotations") or {}).items()},
                dict(value.get("platform") or {}),
            )
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidResponse(f"{shown(value, 80)} is not a descriptor") from error
        if not is_digest(made.digest) or made.size < 0:
            raise InvalidResponse(f"{shown(made.digest, 80)} is not a sha256 digest")
        return made


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index: its bytes as the registry keeps them, media type, and digest."""

    body: bytes = field(repr=False)
    media_type: str
    digest: str

    @staticmethod
    def of(body: bytes, media_type: str = MANIFEST) -> Manifest:
        """The manifest of these bytes."""
        return Manifest(body, media_type, f"sha256:{sha256_bytes(body)}")

    def json(self) -> dict[str, Any]:
        """The content; raise `InvalidResponse` when it is not a JSON object."""
        return json_object(self.body, f"manifest {self.digest}")

    def descriptor(self) -> Descriptor:
        """What names this manifest, with the artifact type and annotations that a list of referrers repeats."""
        value = self.json()
        config = value.get("config")
        kind = value.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else "") or ""
        plain = {"mediaType": self.media_type, "digest": self.digest, "size": len(self.body)}
        return Descriptor.from_json({**plain, "artifactType": kind, "annotations": value.get("annotations")})

    def entries(self, name: str) -> tuple[Descriptor, ...]:
        """The descriptors in a list of the manifest (`layers`, `manifests`); raise `InvalidResponse`."""
        listed = self.json().get(name)
        if not isinstance(listed, list):
            raise InvalidResponse(f"manifest {self.digest} has no list of {name}")
        return tuple(map(Descriptor.from_json, listed))

    def annotations(self) -> dict[str, str]:
        """Its annotations; none where they are not an object."""
        notes = self.json().get("annotations")
        return {str(k): str(v) for k, v in notes.items()} if isinstance(notes, dict) else {}


def json_object(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object that somebody else wrote; raise `InvalidResponse` for anything else, however deep or large."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidResponse(f"{shown(what)} is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidResponse(f"{shown(what)} is not a JSON object")
    return value
