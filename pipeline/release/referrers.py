"""Lists of referrers in registries that keep none themselves: an index under the tag `sha256-<hex>` of the subject.

The referrers tag schema of the OCI distribution specification 1.1; docker-registry 2.8 of Debian needs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from . import media
from .descriptors import Descriptor, Manifest
from .errors import AnswerInvalid, Refused

_TRIES = 5  # how often the list is written again after somebody else wrote it at the same time


class Manifests(Protocol):
    """What reads and writes manifests: a `Registry`."""

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest of a tag or digest."""

    def put_manifest(self, repository: str, reference: str, body: bytes, media_type: str) -> str:
        """Store a manifest, and return its digest."""


def list_tag(digest: str) -> str:
    """The tag that holds the list of what refers to `digest`."""
    return digest.replace(":", "-", 1)


def read_list(registry: Manifests, repository: str, digest: str) -> tuple[Descriptor, ...]:
    """The list as the tag holds it; empty where there is no tag. Raises `AnswerInvalid` when it is no index."""
    found = registry.manifest(repository, list_tag(digest))
    if found is None:
        return ()
    entries = found.json().get("manifests")
    if found.media_type != media.INDEX or not isinstance(entries, list):
        raise AnswerInvalid(f"{repository}:{list_tag(digest)} is not a list of referrers")
    return tuple(Descriptor.from_json(entry) for entry in entries)


def add_to_list(registry: Manifests, repository: str, digest: str, new: Sequence[Descriptor]) -> None:
    """Put all of `new` that it lacks into the list of `digest`, written once.

    The registry has no lock: the list is read again afterwards, and written again where somebody else's write took our
    entries away. Raises `Refused` when that happens every time.
    """
    for _ in range(_TRIES):
        entries = read_list(registry, repository, digest)
        lacking = _lacking(new, entries)
        if not lacking:
            return
        made = {
            "schemaVersion": 2,
            "mediaType": media.INDEX,
            "manifests": [entry.to_json() for entry in (*entries, *lacking)],
        }
        body = json.dumps(made, separators=(",", ":")).encode()
        registry.put_manifest(repository, list_tag(digest), body, media.INDEX)
    if _lacking(new, read_list(registry, repository, digest)):
        raise Refused(
            f"{repository}:{list_tag(digest)} is written by somebody else all the time", hint="run it again later"
        )


def _lacking(wanted: Sequence[Descriptor], entries: Sequence[Descriptor]) -> list[Descriptor]:
    known = {entry.digest for entry in entries}
    return [one for one in wanted if one.digest not in known]
