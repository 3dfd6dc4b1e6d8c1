"""A server's warm-up in a registry: the folder that `pipeline warm-up --in-place` wrote, as one gzipped tar.

What is baked of it gets its times by its content, and no link is collected: the tar keeps names, content, and whether a
file may be executed. Caches of a server are code; `cache push --sign` and `cache pull --key` say whose.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

from pipeline.cache.archive import PUSHED_LIMIT, safe_extract, tar_of
from pipeline.cache.union import OutputExists, ensure_parent
from pipeline.contract.digest import canonical_json, sha256_file
from pipeline.contract.files import is_taken, whole_folder
from pipeline.image.names import PREFIX
from pipeline.image.producer import WARMUP_FILE
from pipeline.registry.descriptors import EMPTY, LAYER_GZIP, MANIFEST, Descriptor, Manifest
from pipeline.servers.in_place import read_folder

from .attachments import TITLE

WARM_UP = "application/vnd.tuned-image-pipeline.warm-up.v1"  # the artifact type
FOLDER = "warm-up"
_MEMBERS = 200_000  # byte code is one file a module


def is_warm_up(folder: Path) -> bool:
    """Whether a folder is one of `warm-up --in-place`, sound or not."""
    return (folder / WARMUP_FILE).is_file()


def artifact(folder: Path) -> tuple[Manifest, list[tuple[str, bytes]], tuple[str, ...]]:
    """The manifest of a folder, the blobs that it names with their media types, and its name for messages.

    Raises `CacheRefused` for a folder that could not be baked.
    """
    told = read_folder(folder)
    layer = gzip.compress(tar_of(folder, FOLDER), mtime=0)
    about = {
        TITLE: "a server's warm-up",
        f"{PREFIX}.server": f"{told.server} {told.versions.get(told.server, '')}".strip(),
        f"{PREFIX}.device": told.device,
    }
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": WARM_UP,
        "config": Descriptor.of(b"{}", EMPTY).to_json(),
        "layers": [{**Descriptor.of(layer, LAYER_GZIP).to_json(), "annotations": {TITLE: FOLDER}}],
        "annotations": about,
    }
    return Manifest.of(canonical_json(value)), [(EMPTY, b"{}"), (LAYER_GZIP, layer)], (_name(folder),)


def unpack(tar: Iterable[bytes], out: Path) -> tuple[str, ...]:
    """Write the folder that a tar has to `out`, new or empty, whole or not at all; return its name for messages.

    Raises `ArchiveRefused`, `CacheRefused` or `OutputExists`.
    """
    if is_taken(out):
        raise OutputExists(f"{out} exists and is not empty", hint="name a new directory")
    ensure_parent(out)
    with whole_folder(out) as made:
        safe_extract(tar, made, strip=1, limit=PUSHED_LIMIT, members=_MEMBERS)
        read_folder(made)
    return (_name(out),)


def _name(folder: Path) -> str:
    told = read_folder(folder)
    return f"{told.server} on {told.device}, {sha256_file(folder / WARMUP_FILE)[:16]}"
