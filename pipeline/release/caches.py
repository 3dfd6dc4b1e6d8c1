"""Tuned caches in a registry, each an OCI artifact: what a GPU host tuned, a builder without GPUs bakes.

    manifest   artifactType and config are ours (see `media`); annotations name the keys
    layer      one gzipped tar with everything below `flashinfer_autotune_cache/`

Laid out as oras lays out a folder, so that `oras pull` writes a cache root and `oras push` makes what we can pull.
The same cache gives the same digests, for one version of zlib.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cache.archive import PUSHED_LIMIT, ArchiveRefused, safe_extract
from pipeline.cache.tar import tar_of
from pipeline.cache.tree import walk
from pipeline.cache.union import merge_roots
from pipeline.contract.digest import canonical_json, sha256_bytes, sha256_file
from pipeline.contract.errors import CacheRefused
from pipeline.contract.places import CACHE_ROOT, MANIFEST_FILE
from pipeline.contract.text import shown
from pipeline.image.labels import PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import Descriptor, Manifest
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import media, sign
from .attach import TITLE, check_annotations
from .faults import SignatureWrong, TagTaken

FOLDER = Path(CACHE_ROOT).name
_UNPACK = "io.deis.oras.content.unpack"  # oras unpacks such a layer into the folder that its title names
_BLOCK = 1 << 20


class NotACache(CacheRefused):
    """What a name leads to in a registry is not a tuned cache."""


@dataclass(frozen=True)
class Stored:
    """A cache in a registry: its name by digest, and its keys."""

    reference: Reference
    keys: tuple[str, ...]


def push(
    registry: Registry, root: Path, name: str, to: Reference, *, signer: sign.Signer | None = None, move: bool = False
) -> Stored:
    """Judge the cache root and push it; sign it before the tag is written.

    `name` is what messages call the root. An existing tag stays where it is unless `move`. Raises `MergeUnsound` for a
    root that must not be used, `TagTaken`, what signing raises, and what the registry raises.
    """
    if signer is not None:
        sign.check_name(to)
        signer.open()
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        clean = Path(temporary) / "root"
        keys = merge_roots([(name, root)], clean)  # checks everything, and takes only what belongs
        body, blobs = _artifact(clean, keys)
    made = Manifest(body, media.MANIFEST, f"sha256:{sha256_bytes(body)}")
    tag = to.tag or "latest"
    there = registry.resolve(to.repository, tag)
    if there not in (None, made.digest) and not move:
        raise TagTaken(f"{to.name}:{tag} is another cache: {there}", hint="choose another tag, or --move it")
    for kind, content in blobs:
        registry.put_blob(to.repository, content, kind)
    registry.put_manifest(to.repository, made)
    check_annotations(registry, to.repository, made.digest, made.json()["annotations"])
    if signer is not None:
        sign.sign(registry, to.at(made.digest), signer)
    if there != made.digest:
        registry.put_manifest(to.repository, made, tag)
    return Stored(to.at(made.digest), keys)


def pull(registry: Registry, source: Reference, out: Path, *, key: str = "") -> Stored:
    """Write the cache that `source` names into `out`, a new or empty directory: judged, and whole or not at all.

    With a public `key` its signature is demanded. Raises `NotACache`, `ArchiveRefused`, `MergeUnsound`,
    `SignatureWrong`, `NotFound`, `OutputExists`, and what the registry raises.
    """
    if key:
        sign.check_name(source)
        sign.check_key(key)
    found = registry.manifest(source.repository, source.target)
    if found is None:
        raise NotFound(f"there is no {source}", hint="check the name; `skopeo list-tags` lists what there is")
    layer = _layer(found, source)
    if key:
        wrong = sign.verify(registry, source.at(found.digest), key)
        if wrong:
            raise SignatureWrong(
                f"{source} is not signed by {shown(key)}: {wrong}", hint="`cache push --sign KEY` signs"
            )
    with tempfile.TemporaryDirectory(prefix="pull-") as temporary:
        blob = registry.save_blob(source.repository, layer.digest, Path(temporary) / "blob", limit=PUSHED_LIMIT)
        root = Path(temporary) / "root"
        safe_extract(_unzipped(blob), root, strip=1, limit=PUSHED_LIMIT)
        keys = merge_roots([(str(source), root)], out)
    return Stored(source.at(found.digest), keys)


def _artifact(root: Path, keys: Sequence[str]) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The manifest's bytes and the blobs that it names, with their media types."""
    tar = tar_of(root, FOLDER)
    if len(tar) > PUSHED_LIMIT:
        raise CacheRefused(
            f"the caches have {len(tar):,} bytes as a tar, more than the {PUSHED_LIMIT:,} that `cache pull` takes",
            hint="push fewer keys: `pipeline cache export`, then remove what is not needed",
        )
    layer = gzip.compress(tar, mtime=0)
    config = canonical_json({"keys": [_summary(root, key) for key in keys]})
    notes = {TITLE: FOLDER, _UNPACK: "true"}
    value = {
        "schemaVersion": 2,
        "mediaType": media.MANIFEST,
        "artifactType": media.CACHE,
        "config": _named(media.CACHE_CONFIG, config).to_json(),
        "layers": [{**_named(media.CACHE_TAR, layer).to_json(), "annotations": notes}],
        "annotations": {TITLE: "tuned caches", f"{PREFIX}.keys": ",".join(keys)},
    }
    return canonical_json(value), [(media.CACHE_CONFIG, config), (media.CACHE_TAR, layer)]


def _summary(root: Path, key: str) -> dict[str, Any]:
    """What one wants to know of a key before it is pulled; docs/release.md has the fields."""
    stored = next(one for one in walk(root).keys if str(one.key) == key)
    manifest = stored.manifest
    assert manifest is not None  # merge_roots took sound keys alone
    host = manifest.record.host
    return {
        "key": key,
        "model": manifest.plan.model,
        "plan": manifest.plan.digest,
        "manifest": sha256_file(stored.path / MANIFEST_FILE),
        "device": ", ".join(dict.fromkeys(host.gpus)) or str(host.cpu.get("model", "")),
        "ranks": len(manifest.ranks),
    }


def _named(kind: str, content: bytes) -> Descriptor:
    return Descriptor(kind, f"sha256:{sha256_bytes(content)}", len(content))


def _layer(found: Manifest, source: Reference) -> Descriptor:
    value = found.json()
    kind = found.descriptor().artifact_type
    if kind not in (media.CACHE, media.CACHE_CONFIG):
        raise NotACache(
            f"{source} is {shown(kind or found.media_type, 80)}, not a tuned cache",
            hint=f"a cache has the artifact type {media.CACHE}; an image's caches: `pipeline cache export`",
        )
    try:
        layers = [Descriptor.from_json(entry) for entry in value["layers"]]
    except (KeyError, TypeError, InvalidResponse) as error:
        raise NotACache(f"{source} names no layers") from error
    if len(layers) != 1 or layers[0].media_type != media.CACHE_TAR:
        raise NotACache(f"{source} is not one layer of {media.CACHE_TAR}")
    return layers[0]


def _unzipped(blob: Path) -> Iterator[bytes]:
    """The tar in blocks; raises `ArchiveRefused` when the gzip stream is broken. The caller bounds what comes out."""
    try:
        with gzip.open(blob) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise ArchiveRefused(f"the layer is not gzip: {shown(str(error), 80)}") from error
