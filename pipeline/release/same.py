"""Whether an image that a registry has already is the one that was built here: only that is signed.

The config says what an image holds, and nothing of who built it: whoever may push can put the same config under a tag,
with blobs that do not fit it, or beside a provenance of their own. So all of it is compared with a build of our own:
layers, annotations, and what BuildKit says of the build but for its clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.registry.reference import Reference

from .images import Image, Pushed, Source, read_image, statements
from .layout import Content, OnDisk

# Of an annotation: another commit may build the same image. Of a statement: when and in which call it was built.
_COMMIT = "org.opencontainers.image.revision"
_PASSING = frozenset(
    {
        "buildInvocationID", "buildStartedOn", "buildFinishedOn",  # SLSA 0.2
        "invocationId", "startedOn", "finishedOn",  # SLSA 1
        "created", "documentNamespace",  # SPDX
    }
)  # fmt: skip


def difference(registry: Source, there: Reference, content: Content) -> str:
    """What the image that `there` names by digest has otherwise than the one in the layout, in a few words; empty where
    they are the same. Raises what reading them raises.
    """
    disk = OnDisk(content)
    place = there.at(content.top.digest)
    theirs, ours = read_image(registry, there), read_image(disk, place)
    if len(theirs.images) != 1:
        return f"it holds {len(theirs.images)} images"
    one, own = theirs.images[0], ours.images[0]
    if _layers(one) != _layers(own):
        return "its layers are other blobs"
    if _notes(theirs, one) != _notes(ours, own):
        return "its annotations say something else"
    if _said(registry, there, one) != _said(disk, place, own):
        return "its provenance tells of another build"
    return ""


def _layers(image: Image) -> tuple[object, object]:
    value = image.manifest.json()
    return value.get("config"), value.get("layers")


def _notes(pushed: Pushed, image: Image) -> list[dict[str, str]]:
    whole = [pushed.top.json().get("annotations") or {}, image.manifest.json().get("annotations") or {}]
    return [{name: text for name, text in notes.items() if name != _COMMIT} for notes in whole]


def _said(source: Source, reference: Reference, image: Image) -> dict[str, Any]:
    """BuildKit's statements without what differs from one build to the next; whose they are `attest verify` asks."""
    found = statements(source, reference, image)
    return {kind: _lasting(value.get("predicate")) for kind, value in found.items()}


def _lasting(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _lasting(inner) for name, inner in value.items() if name not in _PASSING}
    return [_lasting(inner) for inner in value] if isinstance(value, list) else value
