"""What names a blob or a manifest, and a manifest as a registry keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.cache.finding import shown

from .errors import AnswerInvalid
from .reference import is_digest


@dataclass(frozen=True)
class Descriptor:
    """What names a blob or a manifest: media type, digest, size in bytes, and what an index adds."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The descriptor as OCI writes it; empty parts are left out."""
        more = {"artifactType": self.artifact_type, "annotations": dict(self.annotations)}
        base = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return {**base, **{name: value for name, value in more.items() if value}}

    @staticmethod
    def from_json(value: object) -> Descriptor:
        """Read a descriptor; raise `AnswerInvalid` when it is none."""
        try:
            assert isinstance(value, dict)
            notes = value.get("annotations") or {}
            made = Descriptor(
                str(value["mediaType"]),
                str(value["digest"]),
                int(value["size"]),
                str(value.get("artifactType") or ""),
                {str(k): str(v) for k, v in notes.items()},
            )
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise AnswerInvalid(f"{shown(value, 80)} is not a descriptor") from error
        if not is_digest(made.digest) or made.size < 0:
            raise AnswerInvalid(f"{shown(made.digest, 80)} is not a sha256 digest")
        return made


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index: its bytes as the registry keeps them, media type, and digest."""

    body: bytes = field(repr=False)
    media_type: str
    digest: str

    def json(self) -> dict[str, Any]:
        """The content; raise `AnswerInvalid` when it is not a JSON object."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise AnswerInvalid(f"manifest {self.digest} is not JSON") from error
        if not isinstance(value, dict):
            raise AnswerInvalid(f"manifest {self.digest} is not a JSON object")
        return value

    def descriptor(self) -> Descriptor:
        """What names this manifest, with the artifact type and annotations that a list of referrers repeats."""
        value = self.json()
        config = value.get("config")
        kind = value.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else "") or ""
        plain = {"mediaType": self.media_type, "digest": self.digest, "size": len(self.body)}
        return Descriptor.from_json({**plain, "artifactType": kind, "annotations": value.get("annotations")})
