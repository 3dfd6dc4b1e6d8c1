"""The image half of a record, tuner's against final's: versions of libraries, and which files the loader finds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.finding import shown
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import ENV_WORKSPACE

from .contain import Sandbox, run_to_end
from .fill import WORKSPACE

if TYPE_CHECKING:
    from docker import DockerClient

_COMMAND = ("python3", "-m", "pipeline.tune.record", "--image-half")
_UNKNOWN = "unknown"


def half_findings(client: DockerClient, image: str, manifests: Sequence[Manifest], *, max_wait: float) -> Iterator[str]:
    """Findings on every field of the image half that is another in a container of `image` than when it was tuned.

    For keys that are not replayed: a replay compares the whole record. No GPU is given, so that what only a GPU tells
    (cuDNN's version) is not compared, and that is said.
    """
    sandbox = Sandbox(user="0:0", environment={ENV_WORKSPACE: WORKSPACE})
    ended = run_to_end(client, image, list(_COMMAND), sandbox, max_wait=max_wait)
    try:
        told = json.loads(ended.stdout.strip().splitlines()[-1])
        here, libraries = dict(told["image_half"]), dict(told["libraries"])
    except (ValueError, LookupError, TypeError):
        yield f"the image half of the record cannot be read ({ended.status}): {' / '.join(ended.stderr[-3:])}"
        return
    for manifest in manifests:
        yield from differing(manifest, here, libraries)


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
