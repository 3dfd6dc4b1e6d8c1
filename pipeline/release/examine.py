"""Whether an image in a registry has all that proves it, and whether that fits: every answer at once, never the first.

    signature     of the digest that the name leads to, by the given key
    provenance    SLSA, as BuildKit attached it, of this very image manifest
    sbom          BuildKit's SPDX, or our CycloneDX attached as a referrer
    autotune      for each key of the image's label its manifest.json, by the sha256 that the label names
    verdict       replays that passed, of this config digest and this cache layer, together of every key
    annotations   what the labels say of the cache, repeated where a registry shows it

What is attached as a referrer can be attached by anyone who may push. So verdicts and SBOMs count only when the same
key signed them; an autotune manifest is bound by the label, which the image's own signature covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.text import shown
from pipeline.image.labels import KEY
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Manifest
from pipeline.registry.reference import Reference

from . import media, sign
from .attach import attached
from .evidence import Answer, Evidence, foreign, told
from .fits import (
    ANNOTATED,
    MANIFEST_LABEL,
    autotune_answer,
    count,
    listed,
    parsed,
    sbom_answer,
    statement_wrong,
    verdict_answer,
)
from .images import Image, Pushed, read_image, statements

_SLSA = "https://slsa.dev/provenance/"
_SPDX = "https://spdx.dev/Document"


def examine(registry: Registry, reference: Reference, key: str = "", *, transparency_log: bool = False) -> Evidence:
    """Look for all of it. `key` is a public key (file or `env://NAME`); without one signatures are `unchecked`.

    Raises `NotFound`, `KeyUnusable`, `CosignMissing`, `ReferenceInvalid`, and what a registry that fails raises.
    """
    if key:
        sign.check_name(reference)
        sign.check_key(key)
    with foreign(str(reference)):
        pushed = read_image(registry, reference)
    look = _Look(registry, reference, pushed, key, transparency_log)
    answers = [look.signature()]
    if not pushed.images:
        answers.append(Answer("image", "wrong", "the index holds no image"))
    for image in pushed.images:
        answers += [look.provenance(image), look.sbom(image), *look.autotune(image)]
        answers += [look.verdict(image), look.annotations(image)]
    return Evidence(str(reference), pushed.digest, tuple(answers))


@dataclass(frozen=True)
class _Look:
    registry: Registry
    reference: Reference
    pushed: Pushed
    key: str
    transparency_log: bool
    said: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # statements by image manifest, read once

    def _statements(self, image: Image) -> dict[str, dict[str, Any]]:
        if image.manifest.digest not in self.said:
            self.said[image.manifest.digest] = statements(self.registry, self.reference, image)
        return self.said[image.manifest.digest]

    def _unsigned(self, digest: str) -> str:
        """Why a digest does not count as signed by the key; empty when it does."""
        if not self.registry.resolve(self.reference.repository, sign.signature_tag(digest)):
            return "it has no signature"
        subject = self.reference.at(digest)
        return sign.verify(self.registry, subject, self.key, transparency_log=self.transparency_log)

    def signature(self) -> Answer:
        present = self.registry.resolve(self.reference.repository, sign.signature_tag(self.pushed.digest))
        if not present:
            return Answer("signature", "missing", "the image is not signed")
        if not self.key:
            return Answer("signature", "unchecked", "there is one, and no key to check it with: give --key cosign.pub")
        wrong = self._unsigned(self.pushed.digest)
        return Answer("signature", "wrong", wrong) if wrong else Answer("signature", "ok", f"signed by {self.key}")

    def _attached(self, kind: str, what: str) -> Iterator[tuple[Manifest, bytes, str]]:
        """Attachments of one type with why they do not count, empty where they do."""
        for manifest, body in attached(self.registry, self.reference.repository, self.pushed.digest, kind):
            why = self._of_another(manifest) or (self._unsigned(manifest.digest) if self.key else "")
            yield manifest, body, f"the {what} {manifest.digest[:19]}… does not count: {why}" if why else ""

    def _of_another(self, manifest: Manifest) -> str:
        """Why an attachment is not of this image, whose list anyone who may push can write; empty when it is."""
        subject = manifest.json().get("subject")
        named = subject.get("digest") if isinstance(subject, dict) else None
        return "" if named == self.pushed.digest else f"it is of {shown(str(named), 80)}"

    def provenance(self, image: Image) -> Answer:
        def find() -> Answer:
            said = self._statements(image)
            kind = next((name for name in said if name.startswith(_SLSA)), "")
            if not kind:
                return Answer("provenance", "missing", "BuildKit attached none: --provenance=mode=max does")
            wrong = statement_wrong(said[kind], image)
            if wrong:
                return Answer("provenance", "wrong", wrong)
            predicate = said[kind].get("predicate")
            inner = predicate if isinstance(predicate, dict) else {}
            build = inner.get("buildType") or (inner.get("buildDefinition") or {}).get("buildType")
            if not build:
                return Answer("provenance", "wrong", "it does not say how the image was built")
            return Answer("provenance", "ok", f"{kind} by {shown(build, 80)}")

        return told("provenance", find)

    def sbom(self, image: Image) -> Answer:
        def find() -> Answer:
            statement = self._statements(image).get(_SPDX)
            if statement is not None:
                wrong = statement_wrong(statement, image)
                number = count(statement.get("predicate"), "packages")
                return sbom_answer("SPDX by BuildKit", number, wrong)
            refused = []
            for _, body, why in self._attached(media.CYCLONEDX, "SBOM"):
                if why:
                    refused.append(why)
                    continue
                return sbom_answer("CycloneDX, attached", count(parsed(body), "components"), "")
            if refused:
                return Answer("sbom", "wrong", refused[0])
            return Answer("sbom", "missing", "neither BuildKit nor we attached one")

        return told("sbom", find)

    def autotune(self, image: Image) -> list[Answer]:
        keys, named = listed(image, KEY), listed(image, MANIFEST_LABEL)
        if not keys or len(keys) != len(named):
            return [Answer("autotune", "missing", f"the image's labels name no key in {KEY} and {MANIFEST_LABEL}")]
        found: dict[str, bytes] = {}

        def find() -> Answer:
            for _, body in attached(self.registry, self.reference.repository, self.pushed.digest, media.AUTOTUNE):
                found[sha256_bytes(body)] = body
            return Answer("autotune", "ok", "")

        reached = told("autotune", find)
        if reached.state != "ok":
            return [reached]
        pairs = zip(keys, named, strict=True)
        return [told("autotune", partial(autotune_answer, key, sha, found)) for key, sha in pairs]

    def verdict(self, image: Image) -> Answer:
        def find() -> Answer:
            return verdict_answer(((body, why) for _, body, why in self._attached(media.VERDICT, "verdict")), image)

        return told("verdict", find)

    def annotations(self, image: Image) -> Answer:
        labels = image.labels
        lost = [name for name in ANNOTATED if name in labels and name not in image.annotations]
        other = [name for name in ANNOTATED if image.annotations.get(name, labels.get(name)) != labels.get(name)]
        if other:
            return Answer("annotations", "wrong", f"they say something else than the labels: {', '.join(other)}")
        if lost or not any(name in labels for name in ANNOTATED):
            return Answer("annotations", "missing", ", ".join(lost) or "neither labels nor annotations name a key")
        return Answer("annotations", "ok", "as the labels say")
