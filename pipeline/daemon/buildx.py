"""The buildx CLI: whether it is there, which version, what it can do, and how to point it at an engine.

The docker SDK has no BuildKit builds, so these go through `docker buildx build`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.files import write_json
from pipeline.home import cache_home

from .contexts import config_folder
from .errors import BuildxMissing
from .facts import Engine

Version = tuple[int, int, int]

OLDEST: Version = (0, 10, 0)  # the first with `--provenance`
# Which version brought what (release notes of docker/buildx).
CALL: Version = (0, 15, 0)  # `--call` replaces the experimental `--print`
DEVICE: Version = (0, 22, 0)  # `--allow device`; a Dockerfile's `RUN --device` needs frontend 1.27 as well
_PLUGIN_FOLDERS = (
    "/usr/local/lib/docker/cli-plugins",
    "/usr/local/libexec/docker/cli-plugins",
    "/usr/lib/docker/cli-plugins",
    "/usr/libexec/docker/cli-plugins",
)


@dataclass(frozen=True)
class Abilities:
    """What this buildx can do. `outline` are the words after `docker buildx build`, `outline_env` goes with them."""

    outline: tuple[str, ...]
    outline_env: Mapping[str, str]
    check: bool  # `--check`
    allow_device: bool  # `--allow device`
    shm_size: bool = True  # `--shm-size`, in every version that we take


def abilities(of: Version) -> Abilities:
    """The abilities of a version."""
    if of >= CALL:
        return Abilities(("--call=outline,format=json",), {}, check=True, allow_device=of >= DEVICE)
    return Abilities(
        ("--print=outline,format=json",), {"BUILDX_EXPERIMENTAL": "1"}, check=False, allow_device=of >= DEVICE
    )


def environment(engine: Engine) -> dict[str, str]:
    """What makes `docker buildx build` use this engine's own BuildKit (the docker driver), whatever builder is current.

    The builder `default` is the one of the engine that DOCKER_HOST names.
    """
    return {**engine.environment(), "BUILDX_BUILDER": "default"}


def parse_version(text: str) -> Version | None:
    """Read what `docker buildx version` prints: `github.com/docker/buildx v0.29.1 …` or Debian's `0.13.1+ds1 …`."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _programs() -> tuple[Path, ...]:
    """The docker CLI and the plugin file that it would run; fewer when one is not found."""
    docker = shutil.which("docker")
    folders = [str(config_folder(os.environ) / "cli-plugins"), *_PLUGIN_FOLDERS]
    plugin = next((p for f in folders if (p := Path(f) / "docker-buildx").is_file()), None)
    return tuple(p for p in (Path(docker) if docker else None, plugin) if p is not None)


def _identity() -> list[list[object]]:
    rows: list[list[object]] = []
    for path in _programs():
        with contextlib.suppress(OSError):
            state = path.stat()
            rows.append([str(path), state.st_size, state.st_mtime_ns])
    return rows


def version() -> Version:
    """The version of buildx; raise `BuildxMissing` where there is none or it is too old.

    The answer is remembered in the cache folder for as long as both programs stay the same files: asking takes
    70 ms, a fifth of a whole build in which nothing changed.
    """
    memory = cache_home() / "buildx.json"
    identity = _identity()
    if len(identity) == 2:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(memory.read_text(encoding="utf-8"))
            if kept["programs"] == identity:
                major, minor, patch = kept["version"]
                return (int(major), int(minor), int(patch))
    found = _ask()
    if len(identity) == 2:
        with contextlib.suppress(OSError):
            write_json(memory, {"programs": identity, "version": list(found)})
    return found


def _ask() -> Version:
    hint = (
        "install docker-buildx (Debian 13, Ubuntu) or docker-buildx-plugin (Docker's own packages); "
        "as root on Debian `pipeline engine up` does it"
    )
    from pipeline.run import ProcessFailed, run

    if shutil.which("docker") is None:
        raise BuildxMissing(
            "the docker command is not on PATH; it runs buildx", hint=f"name its folder in PATH, or {hint}"
        )
    try:
        found = parse_version(run(["docker", "buildx", "version"], capture=True, timeout=60).stdout)
    except ProcessFailed as error:
        raise BuildxMissing("the docker command has no buildx plugin", hint=hint, details=error.details[:3]) from error
    if found is None or found < OLDEST:
        wanted = ".".join(str(n) for n in OLDEST)
        have = ".".join(str(n) for n in found) if found else "of unknown version"
        raise BuildxMissing(f"buildx is {have}; {wanted} or newer is needed", hint=hint)
    return found
