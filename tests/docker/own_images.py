"""Names of images and containers that this run of the tests makes: two runs can share one engine."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

OWN = f"tuned-test-{secrets.token_hex(4)}"  # the first part of every name
NAME = f"{OWN}/tiny:two"  # the image of the fixture `built`
_RUN = "io.github.tuned-image-pipeline.run"


def containers(client: Any, home: Path) -> list[Any]:
    """The containers of runs with this cache home, each of which has a log there; others may use the engine too."""
    runs = {log.stem.rpartition("-")[2] for log in (home / "tuned-image-pipeline" / "logs").glob("*.log")}
    return [one for one in client.containers.list(all=True, filters={"label": _RUN}) if one.labels[_RUN][:6] in runs]


def remove_images(client: Any) -> None:
    """Remove every image under a name of this run."""
    for image in client.images.list(filters={"reference": f"{OWN}/*"}):
        for tag in image.tags:
            if tag.startswith(f"{OWN}/"):
                client.images.remove(tag, force=True)
