"""What is released already: an image at the registry whose annotation names the same inputs digest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeline.registry.client import Registry
from pipeline.registry.reference import Reference

from . import media
from .annotate import INPUTS
from .journal import Entry, Journal
from .names import Names, pattern
from .sign import Signer, is_signed_by, signature_tag

_NEEDED = frozenset({media.AUTOTUNE, media.VERDICT})
_MOST = 200  # tags of one cell's pattern that are looked at


@dataclass(frozen=True)
class There:
    """A released image: its tag and digest."""

    tag: str
    digest: str


@dataclass(frozen=True)
class Shelf:
    """One repository of a registry, whose list of tags is read at most once.

    With a `signer` only images that its key signed count; where `signed_by` does not name that key (a dry run opens
    none), any signature does.
    """

    registry: Registry
    repository: str
    signer: Signer | None = None
    signed_by: str = ""
    tags: Callable[[], tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", functools.cache(lambda: self.registry.tags(self.repository)))

    def find(self, template: str, names: Names, journal: Journal) -> There | None:
        """The released image of these inputs, with what was attached to it; None where there is none.

        The host's own journal tells the tag where it can; else every tag that the template could have given is looked
        at, so that a fresh CI runner finds what another has released.
        """
        entry, wanted = journal.read(), pattern(template, names)
        known = entry is not None and entry.done and wanted.fullmatch(entry.tag)  # else: of another template
        if entry is not None and known and (found := self._released(entry.tag, journal)):
            return found
        for tag in [tag for tag in self.tags() if wanted.fullmatch(tag)][:_MOST]:
            if found := self._released(tag, journal):
                return found
        return None

    def _released(self, tag: str, journal: Journal) -> There | None:
        top = self.registry.manifest(self.repository, tag)
        if top is None or (top.json().get("annotations") or {}).get(INPUTS) != journal.inputs:
            return None
        there = {one.artifact_type for one in self.registry.referrers(self.repository, top.digest)}
        if not there >= _NEEDED:
            return None
        if self.signer is not None and not self._signed(self.signer, tag, top.digest, journal):
            return None
        return There(tag, top.digest)

    def _signed(self, signer: Signer, tag: str, digest: str, journal: Journal) -> bool:
        """Whether the key signed the image. cosign takes its time, so that its answer is kept in the journal."""
        if self.registry.resolve(self.repository, signature_tag(digest)) is None:
            return False
        entry = journal.read()
        if entry is None or entry.image != digest:
            entry = Entry(digest, "", tag, done=True)
        if not self.signed_by or entry.signed_by == self.signed_by:
            return True
        if not is_signed_by(self.registry, Reference(self.registry.name, self.repository, digest=digest), signer):
            return False
        journal.write(replace(entry, signed_by=self.signed_by))
        return True
