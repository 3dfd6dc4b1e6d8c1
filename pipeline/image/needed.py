"""The part of a Dockerfile that one target is made from.

What BuildKit is given it also puts into its provenance, whole. So it gets the stages that the target needs and no
others: those that tune are no part of the image that is baked from a finished cache, and comments are for readers of
the repository, whose commit an annotation names. Layers and their cache do not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from e2b_dockerfile_utils.syntax import DockerfileInstruction as Instruction

from pipeline.versions.dockerfile import read

_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=", re.IGNORECASE)
_FROM = re.compile(r"(?:^--from=|[=,]from=)([^,\s]+)")


def needed(dockerfile: bytes, target: str) -> bytes:
    """The Dockerfile without the stages that `target` does not need, and without comments; whole where it has no such
    stage.
    """
    text = dockerfile.decode()
    found = read(text)
    places = {stage.name: stage.index for stage in found.stages if stage.name}
    if target not in places:
        return dockerfile
    parts: dict[int, list[Instruction]] = {-1: []}  # by stage; before the first one: ARGs
    for one in found.instructions:
        at = sum(stage.line <= one.start_line for stage in found.stages) - 1
        parts.setdefault(at, []).append(one)
    kept, left = {-1}, [places[target]]
    while left:
        at = left.pop()
        if at not in kept:
            kept.add(at)
            parent = found.stages[at].parent
            left += [] if parent is None else [parent]
            left += [places[name] for name in _named(parts[at]) if name in places]
    lines = text.splitlines()
    out = [line for line in lines[:3] if _DIRECTIVE.match(line)]
    for at in sorted(kept):
        for one in parts[at]:
            out += lines[one.start_line - 1 : one.end_line]
    return "\n".join([*out, ""]).encode()


def _named(instructions: list[Instruction]) -> Iterator[str]:
    """What COPY and the mounts of RUN take files from."""
    for one in instructions:
        for flag in one.flags:
            yield from _FROM.findall(flag)
