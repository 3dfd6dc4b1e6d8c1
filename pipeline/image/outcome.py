"""What came of `pipeline build`, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.manifest import Manifest
from pipeline.contract.verdict import Verdict

_KEPT_LOGS = 20


@dataclass(frozen=True)
class Outcome:
    """A finished image: its name, identity and verdict, what the tuning cost, and where the time went (seconds)."""

    image: str
    config_digest: str
    image_id: str
    manifests: tuple[Manifest, ...]
    verdict: Verdict
    tune_seconds: float
    reused: bool
    size: int
    cache_diff_id: str
    steps: tuple[tuple[str, float], ...]
    docker_host: str
    log: str

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "image": self.image,
            "config_digest": self.config_digest,
            "image_id": self.image_id,
            "key": self.manifests[0].key,
            "keys": [manifest.key for manifest in self.manifests],
            "entries": sum(sum(manifest.entries_per_op().values()) for manifest in self.manifests),
            "ranks": len(self.manifests[0].ranks),
            "tune_seconds": self.tune_seconds,
            "reused": self.reused,
            "size_bytes": self.size,
            "cache_diff_id": self.cache_diff_id,
            "verdict": self.verdict.to_json(),
            "steps": dict(self.steps),
            "docker_host": self.docker_host,
            "log": self.log,
        }


class Clock:
    """Times of the steps, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name`, whether it succeeds or not."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.steps.append((name, round(time.monotonic() - began, 3)))


def log_file(home: Path, name: str) -> Path:
    """A new log's path; the oldest logs beyond the newest twenty are removed."""
    folder = home / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-_KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{time.time_ns() % 1_000_000:06d}.log"
