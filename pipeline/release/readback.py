"""What the registry holds under a digest, compared with what was pushed: annotations are dropped in silence by some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Manifest
from pipeline.registry.errors import InvalidResponse, NotFound

from .faults import NotAsPushed
from .media import ATTESTATION_KIND, INDEXES


@dataclass(frozen=True)
class Held:
    """An image at the registry: its index (or manifest), its own manifest, its config's digest, and whether BuildKit's
    attestations came with it.
    """

    top: Manifest
    image: Manifest
    config: str
    attested: bool


def hold(registry: Registry, repository: str, reference: str) -> Held | None:
    """Read an image back; None where there is none under this reference. Raises a `PublishError`."""
    top = registry.manifest(repository, reference)
    if top is None:
        return None
    image, attested = top, False
    if top.media_type in INDEXES:
        entries = [entry for entry in top.json().get("manifests", ()) if isinstance(entry, dict)]
        kinds = [(entry.get("annotations") or {}).get(ATTESTATION_KIND) for entry in entries]
        images = [entry for entry, kind in zip(entries, kinds, strict=True) if kind is None]
        attested = "attestation-manifest" in kinds
        if len(images) != 1:
            raise InvalidResponse(f"{repository}@{top.digest} holds {len(images)} images, not one")
        found = registry.manifest(repository, str(images[0].get("digest")))
        if found is None:
            raise NotFound(f"{repository}@{top.digest} names a manifest that the registry does not have")
        image = found
    config = (image.json().get("config") or {}).get("digest")
    return Held(top, image, str(config), attested)


def check(held: Held | None, digest: str, config: str, wanted: Mapping[str, str]) -> Held:
    """Raise `NotAsPushed` unless the registry holds this config, with every annotation and with provenance."""
    if held is None or held.top.digest != digest:
        raise NotAsPushed(
            f"the registry does not give {digest[:19]}… back", hint="run it again; see the registry's log"
        )
    wrong = []
    if held.config != config:
        wrong.append(f"its config is {held.config[:19]}…, what was verified is {config[:19]}…")
    for what, manifest in (("index", held.top), ("manifest", held.image)):
        there = manifest.json().get("annotations") or {}
        wrong += [f"the {what} came back without {name}" for name, text in wanted.items() if there.get(name) != text]
    if not held.attested:
        wrong.append("it came back without provenance")
    if wrong:
        raise NotAsPushed(
            f"{digest[:19]}… is not what was pushed: {wrong[0]}",
            details=wrong,
            hint="the engine needs the containerd image store: `pipeline daemon up --store containerd`",
        )
    return held
