"""Keeping what the base image runs: its user, ENTRYPOINT and CMD survive, wrapped by the entry point.

A Dockerfile cannot say "the base's own ENTRYPOINT, with a word in front": setting ENTRYPOINT drops the inherited CMD,
and its JSON form expands no ARG. So the host reads the base's configuration and appends three lines to the last stage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .contexts import ENTRY_POINT

if TYPE_CHECKING:
    from docker import DockerClient

COMMAND = f"/opt/pipeline/bin/{ENTRY_POINT}"
_NOTHING = ("/bin/sh",)  # an image that runs nothing of its own still starts with something


@dataclass(frozen=True)
class Runs:
    """What an image runs: user as its configuration spells it (empty: root), entry point and command in JSON form."""

    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]

    def wrapped(self) -> str:
        """The lines for the end of the last stage. A base that is wrapped already is not wrapped twice."""
        inner = self.entrypoint[1:] if self.entrypoint[:1] == (COMMAND,) else self.entrypoint
        command = self.command if self.command or inner else _NOTHING
        return f"USER {self.user or 'root'}\nENTRYPOINT {json.dumps([COMMAND, *inner])}\n" + (
            f"CMD {json.dumps(list(command))}\n" if command else ""
        )


def read_runs(client: DockerClient, image: str) -> Runs:
    """Read what an image that is in the engine runs."""
    config = client.images.get(image).attrs.get("Config") or {}
    return Runs(
        user=str(config.get("User") or ""),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
    )


def finished_dockerfile(template: bytes, runs: Runs, *, keys: int) -> bytes:
    """The committed Dockerfile with a layer for each key after the first, and what the image runs, at its end."""
    more = "".join(f"COPY --link --from={context_name(at)} / /\n" for at in range(1, keys))
    return template + more.encode() + runs.wrapped().encode()


def context_name(at: int) -> str:
    """The named context of the key with this index; the first replaces the stage `tuned`."""
    return "tuned" if at == 0 else f"tuned-{at}"
