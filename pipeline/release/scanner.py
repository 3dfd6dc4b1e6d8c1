"""The image that makes BuildKit's SBOM, where it can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import log

if TYPE_CHECKING:
    from docker import DockerClient

IMAGE = "docker/buildkit-syft-scanner:stable-1"  # what `--sbom=true` stands for


def available(client: DockerClient) -> str:
    """The scanner's image, pinned by the digest that its registry gives now; empty where no registry gives it."""
    from docker.errors import APIError

    try:
        found = client.images.get_registry_data(IMAGE)
    except APIError:
        log.note(f"{IMAGE} cannot be had: the SBOM is made here, from what was installed")
        return ""
    return f"{IMAGE}@{found.id}"
