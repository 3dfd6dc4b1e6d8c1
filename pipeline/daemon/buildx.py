"""The buildx CLI plugin: which version there is, and how to point it at an engine. The docker SDK has no BuildKit."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import DockerError
from pipeline.run import ProcessFailed, ProgramMissing, run

from .client import Engine, config_folder

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


def check_builder() -> None:
    """Refuse a BUILDX_BUILDER that is not the engine's own BuildKit; note a current builder that is not used.

    Images are warmed up and verified in the engine, on its GPUs; a builder of the drivers `kubernetes`, `remote` or
    `docker-container` has neither the engine's images nor its devices.
    """
    folder = Path(os.environ.get("BUILDX_CONFIG") or config_folder() / "buildx")
    asked = os.environ.get("BUILDX_BUILDER", "")
    name = asked or str(_fields(folder / "current").get("Name") or "")
    # An engine's own builder has no file among the instances.
    driver = str(_fields(folder / "instances" / Path(name).name).get("Driver") or "docker") if name else "docker"
    if driver == "docker":
        return
    if asked:
        raise DockerError(
            f"BUILDX_BUILDER names {asked}, a builder of the {driver} driver, which is not supported: images are "
            "warmed up in the Docker Engine that builds them",
            hint="unset BUILDX_BUILDER; name a remote engine with DOCKER_HOST=ssh://… or a docker context",
        )
    log.note(f"the current buildx builder {name} ({driver} driver) is not used: images are built by the Docker Engine")


def _fields(path: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}
