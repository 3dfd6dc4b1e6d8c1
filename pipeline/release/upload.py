"""From an OCI layout into a registry, under digests alone: what is there already does not travel."""

from __future__ import annotations

from pipeline.registry.client import Registry, parallel_map
from pipeline.registry.descriptors import Manifest

from .layout import Content

_AT_ONCE = 4  # blobs


def upload(registry: Registry, repository: str, content: Content) -> int:
    """Push the blobs that are missing, then the manifests that name them, the index last; no tag.

    Return the bytes of the blobs that had to be pushed. Every step can be repeated. Raises the errors of `Registry`.
    """
    there = parallel_map(lambda one: registry.has_blob(repository, one.digest), content.blobs, _AT_ONCE)
    missing = [one for one, has in zip(content.blobs, there, strict=True) if not has]
    parallel_map(lambda one: registry.put_blob(repository, content.path(one), one.media_type), missing, _AT_ONCE)
    for one in (*content.manifests, content.top):
        if registry.resolve(repository, one.digest) is None:
            registry.put_manifest(repository, Manifest.of(content.path(one).read_bytes(), one.media_type))
    return sum(one.size for one in missing)
