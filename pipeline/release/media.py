"""Media types: OCI's, Docker's, and our own. docs/release.md says what each of ours holds."""

from __future__ import annotations

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
EMPTY = "application/vnd.oci.empty.v1+json"  # the config of an artifact: the two bytes `{}`
OCTETS = "application/octet-stream"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS = (MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_INDEX)  # what we can read, best first
INDEXES = (INDEX, DOCKER_INDEX)

# BuildKit's marks on the index entry of an image's attestations.
ATTESTATION_KIND = "vnd.docker.reference.type"
ATTESTATION_OF = "vnd.docker.reference.digest"

# Artifact types of what is attached to an image; each blob has the media type beside it.
AUTOTUNE = "application/vnd.tuned-image-pipeline.autotune.manifest.v1"
AUTOTUNE_GZIP = "application/vnd.tuned-image-pipeline.autotune.manifest.v1.json+gzip"
VERDICT = "application/vnd.tuned-image-pipeline.verdict.v1"
VERDICT_JSON = "application/vnd.tuned-image-pipeline.verdict.v1+json"

CYCLONEDX = "application/vnd.cyclonedx+json"  # as registered with IANA
SPDX = "application/spdx+json"

# A tuned cache on its own.
CACHE = "application/vnd.tuned-image-pipeline.cache.v1"
CACHE_CONFIG = "application/vnd.tuned-image-pipeline.cache.config.v1+json"
CACHE_TAR = "application/vnd.tuned-image-pipeline.cache.v1.tar+gzip"
