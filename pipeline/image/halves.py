"""The image half of a record, tuner's against final's: versions of libraries, and which files the loader finds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.errors import CacheRefused
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import ENV_WORKSPACE
from pipeline.contract.text import shown

from .contain import Sandbox, run_to_end
from .fill import WORKSPACE
from .gpus import NO_GPUS, Gpus

if TYPE_CHECKING:
    from docker import DockerClient

_COMMAND = ("python3", "-m", "pipeline.tune.record", "--image-half")
_UNKNOWN = "unknown"


class HalfUnread(CacheRefused):
    """A container of an image does not say which versions and libraries it loads."""


@dataclass(frozen=True)
class Half:
    """What a container of an image told: fields of the record, and per library its path and its size as text."""

    fields: Mapping[str, str]
    libraries: Mapping[str, str]
    sizes: Mapping[str, str]


def read_half(client: DockerClient, image: str, *, max_wait: float, gpus: Gpus = NO_GPUS) -> Half:
    """Ask a container of `image`, for at most `max_wait` seconds. Raises `HalfUnread`."""
    sandbox = Sandbox(user="0:0", environment={ENV_WORKSPACE: WORKSPACE}, gpus=gpus)
    ended = run_to_end(client, image, list(_COMMAND), sandbox, max_wait=max_wait)
    try:
        told = json.loads(ended.stdout.strip().splitlines()[-1])
        return Half(dict(told["image_half"]), dict(told["libraries"]), dict(told.get("sizes", {})))
    except (ValueError, LookupError, TypeError) as error:
        raise HalfUnread(
            f"the image half of the record cannot be read ({ended.status}): {' / '.join(ended.stderr[-3:])}",
            details=ended.stderr,
        ) from error


def half_findings(client: DockerClient, image: str, manifests: Sequence[Manifest], *, max_wait: float) -> Iterator[str]:
    """Findings on every field of the image half that is another in a container of `image` than when it was tuned.

    For keys that are not replayed: a replay compares the whole record. No GPU is given, so that what only a GPU tells
    (cuDNN's version) is not compared, and that is said.
    """
    try:
        half = read_half(client, image, max_wait=max_wait)
    except HalfUnread as error:
        yield error.message
        return
    for manifest in manifests:
        yield from differing(manifest, half.fields, half.libraries)


def differing(manifest: Manifest, here: Mapping[str, str], libraries: Mapping[str, str]) -> Iterator[str]:
    """Fields and, where one differs, library paths that are not what the manifest's record says."""
    tuned, before = manifest.record.image_half(), manifest.record.libraries
    unknown = [name for name, value in tuned.items() if here.get(name, _UNKNOWN) == _UNKNOWN != value]
    if unknown:
        log.note(f"not compared without a GPU: {', '.join(sorted(unknown))} ({manifest.key})")
    wrong = [name for name in tuned if name not in unknown and here.get(name) != tuned[name]]
    for name in wrong:
        yield f"{name} is {shown(here.get(name), 60)} in this image, it was {shown(tuned[name], 60)} when tuned"
    if wrong:
        for name, path in sorted(before.items()):
            if libraries.get(name, path) != path:
                yield f"the loader finds {shown(libraries[name])} in this image, it found {shown(path)} when tuned"
        for name in sorted(set(libraries) - set(before)):
            yield f"the loader finds {shown(libraries[name])} in this image, and found no {shown(name)} when tuned"
