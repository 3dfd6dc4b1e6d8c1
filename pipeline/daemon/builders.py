"""buildx builders beside an engine's own BuildKit (drivers `kubernetes`, `remote`, `docker-container`): never built on.

Images are tuned and verified in the engine, on its GPUs, and a builder of its own has neither the engine's images nor
its devices. buildx keeps them in $BUILDX_CONFIG, else `buildx/` in the docker CLI's folder:

    current             {"Name": …}: what `docker buildx use` chose
    instances/<name>    {"Name": …, "Driver": …}; the engine's own builders have no such file
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline import log

from .contexts import config_folder
from .errors import BuilderElsewhere

_WHY = "images are built by the engine's own BuildKit, which the ranks and their GPUs are beside"


def check_builder(env: Mapping[str, str]) -> None:
    """Raise `BuilderElsewhere` where BUILDX_BUILDER names a builder that is no engine's own; note a current one."""
    folder = Path(env.get("BUILDX_CONFIG") or config_folder(env) / "buildx")
    asked = env.get("BUILDX_BUILDER", "")
    driver = _driver(folder, asked)
    if driver:
        raise BuilderElsewhere(
            f"BUILDX_BUILDER names {asked}, a builder of the {driver} driver, which is not supported: {_WHY}",
            hint="unset BUILDX_BUILDER; name a remote engine with DOCKER_HOST=ssh://… or a docker context",
        )
    current = "" if asked else str(_fields(folder / "current").get("Name") or "")
    driver = _driver(folder, current)
    if driver:
        log.note(f"the current buildx builder {current} ({driver} driver) is not used: {_WHY}")


def _driver(folder: Path, name: str) -> str:
    """The driver of a builder that buildx keeps; empty for an engine's own and for one that it does not know."""
    plain = bool(name) and "/" not in name and name not in {".", ".."}
    driver = str(_fields(folder / "instances" / name).get("Driver") or "") if plain else ""
    return "" if driver == "docker" else driver


def _fields(path: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}
