"""Media types of what this project puts into registries. docs/reference/release.md says what each holds."""

from __future__ import annotations

IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"

# BuildKit's marks on the index entry of an image's attestations.
ATTESTATION_KIND = "vnd.docker.reference.type"
ATTESTATION_OF = "vnd.docker.reference.digest"

# Artifact types of what is attached to an image; each blob has the media type beside it.
AUTOTUNE = "application/vnd.tuned-image-pipeline.autotune.manifest.v1"
AUTOTUNE_GZIP = f"{AUTOTUNE}.json+gzip"
VERDICT = "application/vnd.tuned-image-pipeline.verdict.v1"
VERDICT_JSON = f"{VERDICT}+json"
CYCLONEDX = "application/vnd.cyclonedx+json"  # as registered with IANA

# A tuned cache on its own.
CACHE = "application/vnd.tuned-image-pipeline.cache.v1"
CACHE_TAR = f"{CACHE}.tar+gzip"  # as `oras push` may name the layer

# cosign 3 stores signatures as such referrers.
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
