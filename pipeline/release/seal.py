"""Attach and sign: everything that proves an image, before any tag points to it.

push by digest ─▶ attachments ─▶ signatures of those that stand alone ─▶ signature of the image ─▶ (the caller) tag
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline import log as talk
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor
from pipeline.registry.errors import NotFound
from pipeline.registry.reference import Reference

from . import media
from .attach import Attachment, attach
from .sign import Signer, sign

# Bound to the image by its label, which the image's own signature covers.
_BOUND = (media.AUTOTUNE,)


def seal(
    registry: Registry,
    subject: Reference,
    attachments: Sequence[Attachment],
    signer: Signer | None = None,
    *,
    log: Path | None = None,
) -> tuple[Descriptor, ...]:
    """Attach everything to `subject`, which has a digest and is in the registry; sign what stands alone and the image.

    What is there already is neither pushed nor signed again, so that an interrupted run goes on. Without a `signer`
    nothing is signed. Returns what names the attachments. Raises `NotFound`, `AnnotationsLost`, `SigningFailed`,
    `CosignMissing`, `KeyUnusable` and what the registry raises.
    """
    if signer is not None:
        signer.check()
    found = registry.manifest(subject.repository, subject.digest)
    if found is None:
        raise NotFound(f"there is no {subject}", hint="push it by digest first")
    titles = ", ".join(dict.fromkeys(one.title for one in attachments))
    with talk.step(f"attach {titles} to {subject.repository}"):
        made = attach(registry, subject.repository, found.descriptor(), attachments)
        for one, named in zip(attachments, made, strict=True):
            if signer is not None and one.artifact_type not in _BOUND:
                sign(registry, subject.at(named.digest), signer, log=log)
    if signer is not None:
        with talk.step(f"sign {subject.repository}@{subject.digest[:19]}…"):
            sign(registry, subject, signer, log=log)
    return made
