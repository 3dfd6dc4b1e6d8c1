"""What is released already: an image at the registry whose annotation names the same inputs digest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from . import media
from .annotate import INPUTS
from .journal import Journal
from .names import Names, pattern
from .registry import Registry
from .sign import signature_tag

_NEEDED = frozenset({media.AUTOTUNE, media.VERDICT})
_MOST = 200  # tags of one cell's pattern that are looked at


@dataclass(frozen=True)
class There:
    """A released image: its tag and digest."""

    tag: str
    digest: str


@dataclass(frozen=True)
class Shelf:
    """One repository of a registry, whose list of tags is read at most once; `signed`: only signed images count."""

    registry: Registry
    repository: str
    signed: bool = False
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
        if entry is not None and known and (found := self._released(entry.tag, journal.inputs)):
            return found
        for tag in [tag for tag in self.tags() if wanted.fullmatch(tag)][:_MOST]:
            if found := self._released(tag, journal.inputs):
                return found
        return None

    def _released(self, tag: str, inputs: str) -> There | None:
        top = self.registry.manifest(self.repository, tag)
        if top is None or (top.json().get("annotations") or {}).get(INPUTS) != inputs:
            return None
        there = {one.artifact_type for one in self.registry.referrers(self.repository, top.digest)}
        if not there >= _NEEDED:
            return None
        if self.signed and self.registry.resolve(self.repository, signature_tag(top.digest)) is None:
            return None
        return There(tag, top.digest)
