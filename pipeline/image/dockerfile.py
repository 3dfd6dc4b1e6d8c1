"""What the host does to a committed Dockerfile before BuildKit gets it.

It appends to the last stage what only the host knows: a COPY for each cache, the static environment, and what the base
runs. A Dockerfile cannot say "the base's own ENTRYPOINT with a word in front": setting ENTRYPOINT drops the inherited
CMD, and its JSON form expands no ARG.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.places import CODE_ROOT

ENTRY = f"{CODE_ROOT}/bin/pipeline-run"
_NOTHING = ("/bin/sh",)  # an image that runs nothing of its own still starts with something
_FROM = re.compile(rb"(\bfrom=)([a-z][a-z0-9-]*)(?=[\s,])")
_STEP = b"RUN --network=none --mount=type=bind,from=previous"


@dataclass(frozen=True)
class Runs:
    """What an image runs: user as its configuration spells it (empty: root), entry point and command in JSON form."""

    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Runs:
        """Read an image's Config."""
        return Runs(
            str(config.get("User") or ""), tuple(config.get("Entrypoint") or ()), tuple(config.get("Cmd") or ())
        )

    def plain(self) -> str:
        """The base's own, which our layers leave as they are but for the user who wrote them."""
        return f"USER {self.user or 'root'}"

    def wrapped(self) -> str:
        """The same below pipeline-run. A base that is wrapped already is not wrapped twice."""
        inner = self.entrypoint[1:] if self.entrypoint[:1] == (ENTRY,) else self.entrypoint
        command = self.command if self.command or inner else _NOTHING
        lines = [f"USER {self.user or 'root'}", f"ENTRYPOINT {json.dumps([ENTRY, *inner])}"]
        return "\n".join([*lines, f"CMD {json.dumps(list(command))}"] if command else lines)


@dataclass(frozen=True)
class Layer:
    """One COPY: a named context that holds `path` and all above it.

    A linked layer brings its own parent directories, root's, so that it is the same on every base. Where the base has a
    parent that is somebody else's, a plain COPY leaves that as it is (`linked` False).
    """

    context: str
    path: str
    linked: bool = True

    def line(self) -> str:
        """The instruction."""
        if self.linked:
            return f"COPY --link --from={self.context} / /"
        return f"COPY --from={self.context} {self.path} {self.path}"


def finished(
    template: bytes, layers: Sequence[Layer], environment: Mapping[str, str], runs: Runs | None, *, wrap: bool = True
) -> bytes:
    """The Dockerfile with the caches, the environment and what the image runs at its end.

    A server's caches are found by the environment alone, so that its image runs what the base does (`wrap` False).
    """
    lines = [layer.line() for layer in layers]
    lines += [f"ENV {name}={json.dumps(value).replace('$', chr(92) + '$')}" for name, value in environment.items()]
    lines += [runs.wrapped() if wrap else runs.plain()] if runs is not None else []
    return template.rstrip(b"\n") + "\n".join(["", *lines, ""]).encode()


def with_devices(dockerfile: bytes, devices: Sequence[str]) -> bytes:
    """The Dockerfile whose tuning step asks for CDI devices."""
    assert dockerfile.count(_STEP) == 1, "a template has one tuning step"
    flags = " ".join(f"--device={name}" for name in devices)
    return dockerfile.replace(_STEP, f"RUN {flags}".encode() + _STEP.removeprefix(b"RUN"))


def without_links(dockerfile: bytes) -> bytes:
    """The Dockerfile with plain copies: the same files, in layers that depend on what lies below."""
    return dockerfile.replace(b"COPY --link ", b"COPY ")


def pin_contexts(dockerfile: bytes, contexts: Mapping[str, Path]) -> tuple[bytes, dict[str, Path]]:
    """The Dockerfile and its contexts under names of their content: `plan` becomes `plan-<12 digits>`.

    BuildKit keeps what it received for a local context and, at the next build, receives only what changed into the same
    folder. A directory in which something changed then carries the time of that moment, whatever time was sent (seen:
    Engine 26.1.5), and the layer differs. A context that has another name for other content is received anew.
    """
    names = {name: f"{name}-{stat_digest(place)[:12]}" for name, place in contexts.items()}
    text = _FROM.sub(lambda m: m[1] + names.get(m[2].decode(), m[2].decode()).encode(), dockerfile)
    return text, {names[name]: place for name, place in contexts.items() if names[name].encode() in text}


def stat_digest(place: Path) -> str:
    """Over paths, sizes, modes and times below a folder: what BuildKit itself compares."""
    return sha256_json(sorted(_rows(place)))


def _rows(place: Path) -> Iterator[list[object]]:
    for folder, names, files in os.walk(place):
        for one in (*names, *files):
            path = Path(folder) / one
            stat = path.lstat()
            yield [str(path.relative_to(place)), stat.st_mode, stat.st_size * path.is_file(), stat.st_mtime_ns]
