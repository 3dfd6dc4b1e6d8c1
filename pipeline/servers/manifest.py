"""What an image says of a server's start that it was warmed up with. No value of a secret is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.contract.errors import CacheRefused

from .judge import Summary

SCHEMA = 1
PLACE = "/opt/pipeline/server"  # outside of the caches' root: an empty mount there hides nothing of it
FILE = str(PurePosixPath(PLACE, "manifest.json"))


@dataclass(frozen=True)
class ServerManifest:
    """`arguments` with secrets hidden; `environment` is the image's static ENV; `model` maps the absolute paths of the
    config files to their text; `hashed` names the variables that the server itself says enter its hashes, and `caches`
    maps kinds to bytes.
    """

    server: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    model: Mapping[str, str]
    versions: Mapping[str, str]
    hashed: tuple[str, ...]
    device: str
    cold: Summary
    warm: Summary
    caches: Mapping[str, int]
    not_baked: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def read(text: str) -> ServerManifest:
        """From JSON text. Raises `CacheRefused`."""
        try:
            value = json.loads(text)
            if value.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            lists = {name: tuple(value[name]) for name in ("arguments", "secrets", "hashed", "notes")}
            summaries = {name: Summary.read(value[name]) for name in ("cold", "warm")}
            return ServerManifest(**{**value, **lists, **summaries})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheRefused(f"{FILE} is no manifest of a server: {error}", hint="warm up again") from error

    def table(self) -> list[str]:
        """Lines for people: seconds by phase, megabytes by kind."""
        rows = [f"{'seconds':<24}{'cold':>8}{'warm':>8}"]
        for name in {**self.cold.seconds, **self.warm.seconds}:
            cold, warm = self.cold.seconds.get(name), self.warm.seconds.get(name)
            rows.append(
                f"{name:<24}{'' if cold is None else f'{cold:.1f}':>8}{'' if warm is None else f'{warm:.1f}':>8}"
            )
        rows.append(f"{'ready':<24}{self.cold.ready:>8.1f}{self.warm.ready:>8.1f}")
        rows += [f"{kind:<24}{size / 1e6:>8.1f} MB" for kind, size in sorted(self.caches.items())]
        return rows


def write(root: Path, manifest: ServerManifest) -> None:
    """Write it below `root`, as it will lie in the image."""
    from pipeline.contract.files import write_json

    write_json(root / FILE.lstrip("/"), manifest.to_json())
    (root / PLACE.lstrip("/")).chmod(0o755)
