"""Caches in a registry: what a GPU host tuned, a builder without GPUs bakes, and Kubernetes can mount.

    manifest   an image manifest whose artifactType says that it is a tuned cache; annotations name the keys
    config     an image config: its labels are those that KServe's kernel-cache manager reads
    layer      one gzipped tar with everything below `flashinfer_autotune_cache/`

So `docker pull` and image volumes take it, and `oras pull` writes a cache root. The same cache gives the same digests,
for one version of zlib. A server's warm-up is an artifact of another type (`warm_ups`), for baking alone.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cache.archive import PUSHED_LIMIT, ArchiveRefused, safe_extract, tar_of
from pipeline.cache.tree import Stored as CacheOfKey
from pipeline.cache.tree import walk
from pipeline.cache.union import merge_roots
from pipeline.contract.digest import canonical_json, sha256_bytes, sha256_file
from pipeline.contract.errors import CacheRefused, PublishError
from pipeline.contract.places import CACHE_ROOT, MANIFEST_FILE
from pipeline.contract.text import shown
from pipeline.image.names import PREFIX
from pipeline.registry.client import Registry
from pipeline.registry.descriptors import IMAGE_CONFIG, LAYER_GZIP, MANIFEST, Descriptor, Manifest
from pipeline.registry.errors import InvalidResponse, NotFound
from pipeline.registry.reference import Reference

from . import cosign, warm_ups
from .attachments import TITLE, check_annotations
from .images import untrusted

CACHE = "application/vnd.tuned-image-pipeline.cache.v1"  # the artifact type
CACHE_TAR = f"{CACHE}.tar+gzip"  # as `oras push` may name the layer
FOLDER = Path(CACHE_ROOT).name
_KEYS = f"{PREFIX}.keys"
_UNPACK = "io.deis.oras.content.unpack"  # oras unpacks such a layer into the folder that its title names
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Stored:
    """A cache in a registry: its name by digest, and its keys."""

    reference: Reference
    keys: tuple[str, ...]


def push(
    registry: Registry, root: Path, name: str, to: Reference, *, signer: cosign.Signer | None = None, move: bool = False
) -> Stored:
    """Judge a cache root, or a folder of `warm-up --in-place`, and push it; sign it before the tag is written.

    `name` is what messages call the root. An existing tag stays where it is unless `move`. Raises `CacheRefused` for a
    root that must not be used, `PublishError`, what signing raises, and what the registry raises.
    """
    if signer is not None:
        signer.check()
    if warm_ups.is_warm_up(root):
        made, blobs, keys = warm_ups.artifact(root)
    else:
        with tempfile.TemporaryDirectory(prefix="push-") as temporary:
            clean = Path(temporary) / "root"
            keys = merge_roots([(name, root)], clean)  # checks everything, and takes only what belongs
            made, blobs = _artifact(clean)
    tag = to.tag or "latest"
    there = registry.resolve(to.repository, tag)
    if there not in (None, made.digest) and not move:
        raise PublishError(f"{to.name}:{tag} is another cache: {there}", hint="choose another tag, or --move it")
    for kind, content in blobs:
        registry.put_blob(to.repository, content, kind)
    registry.put_manifest(to.repository, made)
    check_annotations(registry, to.repository, made.digest, made.annotations())
    if signer is not None:
        cosign.sign(registry, to.at(made.digest), signer)
    if there != made.digest:
        registry.put_manifest(to.repository, made, tag)
    return Stored(to.at(made.digest), keys)


def pull(registry: Registry, source: Reference, out: Path, *, verifier: cosign.Verifier | None = None) -> Stored:
    """Write the cache or warm-up that `source` names into `out`, new or empty: judged, and whole or not at all.

    With a `verifier` its signature is demanded. Raises `CacheRefused`, `PublishError`, `NotFound`, and what the
    registry raises.
    """
    if verifier:
        verifier.check()
    found = registry.manifest(source.repository, source.target)
    if found is None:
        raise NotFound(f"there is no {source}", hint="check the name; `skopeo list-tags` lists what there is")
    kind, layer = _layer(found, source)
    if verifier:
        wrong = cosign.verify(registry, source.at(found.digest), verifier)
        if wrong:
            raise PublishError(f"{source} is not signed by {verifier}: {wrong}", hint="`cache push --sign KEY` signs")
    with tempfile.TemporaryDirectory(prefix="pull-") as temporary:
        blob = Path(temporary) / "blob"
        with blob.open("w+b") as stream:
            registry.fetch_blob(source.repository, layer.digest, stream, limit=PUSHED_LIMIT)
        if kind == warm_ups.WARM_UP:
            keys = warm_ups.unpack(_unzipped(blob), out)
        else:
            root = Path(temporary) / "root"
            safe_extract(_unzipped(blob), root, strip=1, limit=PUSHED_LIMIT)
            keys = merge_roots([(str(source), root)], out)
    return Stored(source.at(found.digest), keys)


def _artifact(root: Path) -> tuple[Manifest, list[tuple[str, bytes]]]:
    """The manifest of a sound root, and the blobs that it names, with their media types."""
    caches = walk(root).keys
    tar = tar_of(root, FOLDER)
    layer = gzip.compress(tar, mtime=0)
    config = canonical_json(
        {
            "architecture": _architecture(caches),
            "os": "linux",
            "config": {"Labels": _labels(caches)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256_bytes(tar)}"]},
        }
    )
    named = {**Descriptor.of(layer, LAYER_GZIP).to_json(), "annotations": {TITLE: FOLDER, _UNPACK: "true"}}
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": CACHE,
        "config": Descriptor.of(config, IMAGE_CONFIG).to_json(),
        "layers": [named],
        "annotations": {TITLE: "tuned caches", _KEYS: _keys(caches)},
    }
    return Manifest.of(canonical_json(value)), [(IMAGE_CONFIG, config), (LAYER_GZIP, layer)]


def _labels(caches: Sequence[CacheOfKey]) -> dict[str, str]:
    """What is inside, and how KServe is to mount it: this folder of the image at the path that the variable names."""
    return {
        _KEYS: _keys(caches),
        f"{PREFIX}.caches": json.dumps([_summary(one) for one in caches], sort_keys=True),
        "io.kserve.km/framework": "flashinfer",
        "io.kserve.km/cache-type": "flashinfer-autotune",
        "io.kserve.km/cache-hash": ",".join(one.key.hash for one in caches),
        "io.kserve.km/cache-mount-subpath": FOLDER,
        "io.kserve.km/cache-root-env": f"PIPELINE_AUTOTUNE_CACHE_DIR={CACHE_ROOT}",
    }


def _keys(caches: Sequence[CacheOfKey]) -> str:
    return ",".join(str(one.key) for one in caches)


def _architecture(caches: Sequence[CacheOfKey]) -> str:
    """The platform that the caches are for. A GPU's cache says none: most hosts of GPUs are amd64."""
    return "arm64" if {one.key.arch for one in caches} & {"cpu-aarch64", "cpu-arm64"} else "amd64"


def _summary(cache: CacheOfKey) -> dict[str, Any]:
    """What one wants to know of a key before it is pulled; docs/reference/release.md has the fields."""
    manifest = cache.manifest
    assert manifest is not None  # merge_roots took sound keys alone
    host = manifest.record.host
    return {
        "key": str(cache.key),
        "model": manifest.plan.model,
        "plan": manifest.plan.digest,
        "manifest": sha256_file(cache.path / MANIFEST_FILE),
        "device": ", ".join(dict.fromkeys(host.gpus)) or str(host.cpu.get("model", "")),
        "ranks": len(manifest.ranks),
    }


def _layer(found: Manifest, source: Reference) -> tuple[str, Descriptor]:
    """The artifact type, and the one layer."""
    try:
        with untrusted(str(source)):
            kind = found.descriptor().artifact_type
            if kind not in (CACHE, warm_ups.WARM_UP):
                raise CacheRefused(
                    f"{source} is {shown(kind or found.media_type, 80)}, not a tuned cache",
                    hint=f"a cache has the artifact type {CACHE}; an image's caches: `pipeline cache export`",
                )
            layers = found.entries("layers")
    except InvalidResponse as error:
        raise CacheRefused(f"{source} is not a tuned cache: {error.message}") from error
    if len(layers) != 1 or layers[0].media_type not in (LAYER_GZIP, CACHE_TAR):
        raise CacheRefused(f"{source} is not one layer of {LAYER_GZIP}")
    return kind, layers[0]


def _unzipped(blob: Path) -> Iterator[bytes]:
    """The tar in blocks; raises `ArchiveRefused` when the gzip stream is broken. The caller bounds what comes out."""
    try:
        with gzip.open(blob) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise ArchiveRefused(f"the layer is not gzip: {shown(str(error), 80)}") from error
