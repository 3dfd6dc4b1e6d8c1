"""The buildx CLI plugin: which version there is, and how to point it at an engine. The docker SDK has no BuildKit."""

from __future__ import annotations

import os
import re

from pipeline import log
from pipeline.contract.errors import DockerError
from pipeline.run import ProcessFailed, ProgramMissing, run

from .client import Engine

Version = tuple[int, int, int]

OLDEST: Version = (0, 10, 0)  # the first with `--provenance`
CALL: Version = (0, 15, 0)  # `--call` replaces the experimental `--print`, and `--check`
_HINT = (
    "install docker-buildx (Debian 13, Ubuntu) or docker-buildx-plugin (Docker's own packages); as root on Debian "
    "`pipeline daemon up` does it"
)


class BuildxMissing(DockerError):
    """The docker CLI or its buildx plugin is missing or too old."""


def environment(engine: Engine) -> dict[str, str]:
    """What makes `docker buildx build` use this engine's own BuildKit (the docker driver), whatever builder is current.

    The builder `default` is the one of the engine that DOCKER_HOST names.
    """
    return {**engine.environment(), "BUILDX_BUILDER": "default"}


def parse_version(text: str) -> Version | None:
    """Read what `docker buildx version` prints: `github.com/docker/buildx v0.29.1 …` or Debian's `0.13.1+ds1 …`."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def version() -> Version:
    """The version of buildx; raise `BuildxMissing` where there is none or it is too old."""
    try:
        found = parse_version(run(["docker", "buildx", "version"], capture=True, timeout=60).stdout)
    except ProgramMissing as error:
        raise BuildxMissing("the docker command, which runs buildx, is not on PATH", hint=_HINT) from error
    except ProcessFailed as error:
        raise BuildxMissing("the docker command has no buildx plugin", hint=_HINT, details=error.details[:3]) from error
    if found is None or found < OLDEST:
        have = ".".join(map(str, found)) if found else "of unknown version"
        raise BuildxMissing(f"buildx is {have}; {'.'.join(map(str, OLDEST))} or newer is needed", hint=_HINT)
    return found


def note_other_builder() -> None:
    """Say that a builder which BUILDX_BUILDER names is not used.

    Images are warmed up and verified in the engine, on its GPUs: a builder of the drivers `kubernetes`, `remote` or
    `docker-container` has neither the engine's images nor its devices.
    """
    asked = os.environ.get("BUILDX_BUILDER", "")
    if asked not in ("", "default"):
        log.note(f"BUILDX_BUILDER={asked} is not used: images are built by the Docker Engine that runs them")
