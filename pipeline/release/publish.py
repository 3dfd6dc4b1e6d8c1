"""One verified image into the registry: push by digest, read back, attach and sign, and the tag last.

Nothing that has a tag lacks its attestations, whenever this is interrupted. What an earlier run left is looked up and
taken: a pushed digest is not pushed again, an attached file is not attached twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import log
from pipeline.contract.verdict import Verdict
from pipeline.image.bake import bake
from pipeline.image.buildkit import Export
from pipeline.image.flow import Finished
from pipeline.registry.client import Registry
from pipeline.registry.reference import Reference

from .attaching import Proofs
from .faults import ExportBroken, TagTaken
from .journal import Entry, Journal
from .layout import Content, read_content
from .readback import Held, check, hold
from .same import difference
from .upload import upload


@dataclass(frozen=True)
class Published:
    """The digest that the tag stands for now, and whether anything had to be pushed or attached for it."""

    digest: str
    new: bool


@dataclass(frozen=True)
class Publisher:
    """One image on its way: `place` holds registry, repository and tag; `layout` receives it from BuildKit."""

    registry: Registry
    place: Reference
    journal: Journal
    notes: Mapping[str, str]
    scanner: str
    layout: Path
    proofs: Proofs

    def publish(self, done: Finished, verdicts: tuple[Verdict, ...]) -> Published:
        """Bring the image to its tag. Raise `TagTaken` before anything is pushed when the tag is another image's."""
        config = done.built.config_digest
        standing = self._standing(config)
        own = standing is None or self._is_own(standing, done, config)
        held = standing or self._pushed(done, config)
        attached = self.proofs.attach(
            self.registry, self.place.at(held.top.digest), done, verdicts, done.prepared.builder.log
        )
        if standing is None:
            self._tag(held, config)
        self.journal.write(
            Entry(held.top.digest, config, self.place.tag, done=True, signed_by=self.proofs.signed_by, own=own)
        )
        return Published(held.top.digest, new=standing is None or attached)

    def _standing(self, config: str) -> Held | None:
        """The image that the tag stands for; None where there is none. Raises `TagTaken` when it is another one."""
        held = hold(self.registry, self.place.repository, self.place.tag)
        if held is not None and held.config != config:
            raise TagTaken(
                f"{self.place} stands for another image ({held.config[:19]}…), and a tag is never moved",
                hint="was it tuned again? {cache} in the tag's template tells the two apart; or remove the tag there",
            )
        if held is not None and not held.attested:
            raise TagTaken(
                f"{self.place} stands for this image without its provenance, and a tag is never moved",
                hint="somebody pushed it otherwise: remove the tag there",
            )
        return held

    def _is_own(self, standing: Held, done: Finished, config: str) -> bool:
        """Whether what the tag stands for is known to be what was built here.

        A key vouches for nothing else: with one, raise `TagTaken` where it is not, and this key has not signed it yet.
        """
        there, entry = self.place.at(standing.top.digest), self.journal.read()
        if entry is not None and entry.own and entry.image == there.digest:
            return True
        if self.proofs.signer is None:
            return False
        if self.proofs.signed(self.registry, there):
            return True
        why = difference(self.registry, there, self._exported(done, config))
        if why:
            raise TagTaken(
                f"{self.place} stands for an image that this key has not signed, and that is not the one built here: "
                f"{why}",
                hint="whose is it? `pipeline attestation verify` with their key tells; remove the tag, or take another",
            )
        return True

    def _exported(self, done: Finished, config: str) -> Content:
        """The verified image as BuildKit exports it. Raises `ExportBroken`."""
        with log.step("export the image with its provenance"):
            made = bake(done.prepared, done.keys, Export(self.layout, str(self.place), self.notes, self.scanner))
        content = read_content(self.layout, made.image_id)
        if content.config != config:
            raise ExportBroken(
                f"BuildKit exported config {content.config[:19]}…, what was verified is {config[:19]}…",
                hint="something that the image is made of has changed meanwhile: run it again",
            )
        return content

    def _pushed(self, done: Finished, config: str) -> Held:
        """The image at the registry without its tag: from an earlier run, or pushed now."""
        repository = self.place.repository
        entry = self.journal.read()
        if entry is not None and entry.own and entry.config == config:
            held = hold(self.registry, repository, entry.image)
            if held is not None and held.config == config:
                log.note(f"pushed by an earlier run: {entry.image}")
                return held
        content = self._exported(done, config)
        with log.step(f"push to {self.place.name}"):
            sent = upload(self.registry, repository, content)
        log.note(f"{sent:,} bytes of blobs had to be pushed")
        digest = content.top.digest
        held = check(hold(self.registry, repository, digest), digest, config, self.notes)
        self.journal.write(Entry(digest, config, self.place.tag, own=True))
        return held

    def _tag(self, held: Held, config: str) -> None:
        """Give the tag, unless somebody gave it away meanwhile."""
        standing = self._standing(config)
        if standing is not None and standing.top.digest != held.top.digest:
            raise TagTaken(f"{self.place} was given to {standing.top.digest[:19]}… meanwhile", hint="run it again")
        if standing is None:
            with log.step(f"tag {self.place}"):
                top = held.top
                self.registry.put_manifest(self.place.repository, top, self.place.tag)


def move(registry: Registry, place: Reference, digest: str, tags: tuple[str, ...]) -> tuple[str, ...]:
    """Let moving tags stand for a digest of the repository; return those that had to be moved."""
    moved = []
    for tag in tags:
        if registry.resolve(place.repository, tag) == digest:
            continue
        top = registry.manifest(place.repository, digest)
        assert top is not None, "the image was read a moment ago"
        with log.step(f"move {replace(place, tag=tag)}"):
            registry.put_manifest(place.repository, top, tag)
        moved.append(tag)
    return tuple(moved)
