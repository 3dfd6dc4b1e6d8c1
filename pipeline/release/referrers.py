"""Lists of referrers in registries that keep none themselves: an index under the tag `sha256-<hex>` of the subject.

The referrers tag schema of the OCI distribution specification 1.1; docker-registry 2.8 of Debian needs it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from . import media
from .descriptors import Descriptor
from .errors import AnswerInvalid, Refused

if TYPE_CHECKING:
    from .registry import Registry

_TRIES = 5  # how often the list is written again after somebody else wrote it at the same time


def list_tag(digest: str) -> str:
    """The tag that holds the list of what refers to `digest`."""
    return digest.replace(":", "-", 1)


def read_list(registry: Registry, repository: str, digest: str) -> tuple[Descriptor, ...]:
    """The list as the tag holds it; empty where there is no tag. Raises `AnswerInvalid` when it is no index."""
    found = registry.manifest(repository, list_tag(digest))
    if found is None:
        return ()
    entries = found.json().get("manifests")
    if found.media_type != media.INDEX or not isinstance(entries, list):
        raise AnswerInvalid(f"{repository}:{list_tag(digest)} is not a list of referrers")
    return tuple(Descriptor.from_json(entry) for entry in entries)


def add_to_list(registry: Registry, repository: str, digest: str, new: Descriptor) -> None:
    """Put `new` into the list of `digest` unless it is there.

    The registry has no lock: the list is read again afterwards, and written again where somebody else's write took our
    entry away. Raises `Refused` when that happens every time.
    """
    for _ in range(_TRIES):
        entries = read_list(registry, repository, digest)
        if any(entry.digest == new.digest for entry in entries):
            return
        made = {"schemaVersion": 2, "mediaType": media.INDEX, "manifests": [e.to_json() for e in (*entries, new)]}
        registry.put_manifest(repository, list_tag(digest), json.dumps(made).encode(), media.INDEX)
    if all(entry.digest != new.digest for entry in read_list(registry, repository, digest)):
        raise Refused(
            f"{repository}:{list_tag(digest)} is written by somebody else all the time", hint="run it again later"
        )
