"""Everything that proves an image, attached to its digest before it gets a tag: each key's manifest, the verdicts, an
SBOM where BuildKit made none, and the signatures last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.verdict import Verdict
from pipeline.image.contexts import FIXED_TIME
from pipeline.image.flow import Finished
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor
from pipeline.registry.reference import Reference

from . import media
from .attach import Attachment, autotune, sbom, verdict
from .contents import look
from .sbom import make
from .seal import seal
from .sign import Signer, is_signed_by, signature_tag


@dataclass(frozen=True)
class Proofs:
    """`signer` None signs nothing, `signed_by` is the sha256 of its public key; `scanned`: BuildKit makes the SBOM.

    `listed` keeps the SBOM of each stack of layers below the caches, which cells of one run share.
    """

    signer: Signer | None = None
    signed_by: str = ""
    scanned: bool = False
    listed: dict[str, Attachment] = field(default_factory=dict)

    def signed(self, registry: Registry, image: Reference) -> bool:
        """Whether the signer's key signed the digest of `image` already."""
        present = registry.resolve(image.repository, signature_tag(image.digest)) is not None
        return self.signer is not None and present and is_signed_by(registry, image, self.signer)

    def attach(
        self, registry: Registry, image: Reference, done: Finished, verdicts: tuple[Verdict, ...], logfile: Path
    ) -> bool:
        """Attach to the digest of `image` what is not there yet, and sign; return whether anything was attached."""
        before = registry.referrers(image.repository, image.digest)
        files = [*_manifests(done), *(verdict(one) for one in verdicts)]
        if not self.scanned and (self.signer is not None or not _has_sbom(before)):  # one that is there may lack ours
            files.append(self._sbom(done, image.name))
        made = seal(registry, image, files, self.signer, log=logfile)
        return bool({one.digest for one in made} - {one.digest for one in before})

    def _sbom(self, done: Finished, name: str) -> Attachment:
        """What is installed in the image, as CycloneDX.

        It is of the layers below the caches, which install nothing, and carries the time that all images have: that of
        a re-tuned image is the same blob, which the registry has already.
        """
        client, image = done.prepared.client, done.built.image_id
        below = sha256_json(client.images.get(image).attrs["RootFS"]["Layers"][: -len(done.keys)])
        if below not in self.listed:
            with log.step("list what is installed"):
                contents = look(client, image, done.prepared.home / "wheels")
            created = datetime.fromtimestamp(FIXED_TIME, UTC)
            self.listed[below] = sbom(make(contents, name=name, digest=f"sha256:{below}", created=created))
        return self.listed[below]


def _manifests(done: Finished) -> Iterator[Attachment]:
    for key in done.keys:
        yield autotune(key.manifest_bytes)


def _has_sbom(attached: tuple[Descriptor, ...]) -> bool:
    return any(one.artifact_type == media.CYCLONEDX for one in attached)
