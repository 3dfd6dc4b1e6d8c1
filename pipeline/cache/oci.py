"""A cache root as an OCI image layout: one image of one layer, so that registries keep it and `FROM` can name it.

    DIR/oci-layout, DIR/index.json, DIR/blobs/sha256/{layer, config, manifest}
    skopeo copy oci:DIR:TAG docker://registry/caches:TAG

skopeo 1.9.3 read and copied such a layout. A build takes it as a context (`oci-layout://`) only where the builder
has a containerd store: Engine 26.1.5 with the classic store says `unknown scheme oci-layout`.
The layer is an uncompressed tar with fixed order, owners and modes, so that the same cache gives the same digests.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.digest import canonical_json, sha256_bytes
from pipeline.contract.errors import CacheRefused
from pipeline.contract.files import write_whole
from pipeline.contract.places import CACHE_ROOT

from .archive import LIMIT, safe_extract
from .finding import shown
from .jsontext import parse_object, read_bytes
from .union import OutputExists, make_room

_EPOCH = 1_577_836_800  # 2020-01-01: any fixed time
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_NAME = "org.opencontainers.image.ref.name"


class LayoutInvalid(CacheRefused):
    """A directory is not an OCI layout with a cache, or its blobs are not what their digests say."""


@dataclass(frozen=True)
class Written:
    """Digests of what was written: the manifest is the image's digest, the layer's is its diff id too."""

    manifest: str
    layer: str


def write_layout(root: Path, out: Path, *, tag: str, architecture: str, labels: Mapping[str, str]) -> Written:
    """Write the cache root as an OCI layout into `out`, which must not exist. Raises `OutputExists`."""
    if os.path.lexists(out):
        raise OutputExists(f"{shown(str(out))} exists", hint="name a new directory")
    make_room(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = Path(scratch) / "layout"
        layer = _blob(made, tar_of(root, CACHE_ROOT), _LAYER)
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
            "history": [{"created_by": "pipeline cache export"}],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _blob(made, canonical_json(config), _CONFIG),
            "layers": [layer],
            "annotations": dict(labels),
        }
        entry = _blob(made, canonical_json(manifest), _MANIFEST)
        entry |= {"platform": {"architecture": architecture, "os": "linux"}, "annotations": {_NAME: tag}}
        write_whole(
            made / "index.json", canonical_json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]})
        )
        write_whole(made / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        made.rename(out)
    return Written(str(entry["digest"]), str(layer["digest"]))


def read_layout(layout: Path, tag: str, destination: Path) -> None:
    """Unpack the cache root of a layout's last layer into `destination`, every digest checked.

    Raises `LayoutInvalid`, or `ArchiveRefused` when the layer must not be unpacked.
    """
    index, _ = parse_object(read_bytes(layout / "index.json"), "index.json")
    try:
        named = [m for m in index["manifests"] if not tag or m.get("annotations", {}).get(_NAME) == tag]
        if len(named) != 1:
            raise LayoutInvalid(f"{len(named)} images in {shown(str(layout))} match {tag or 'it'}", hint="oci:DIR:TAG")
        manifest, _ = parse_object(_read_blob(layout, named[0]), "the image's manifest")
        layer = manifest["layers"][-1]
        if layer["mediaType"] != _LAYER:
            raise LayoutInvalid(f"the last layer is {shown(layer['mediaType'], 60)}", hint=f"{_LAYER} is read")
        data = _read_blob(layout, layer)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise LayoutInvalid(f"{shown(str(layout))} is not an OCI layout with a cache: {error!r}") from error
    safe_extract(io.BytesIO(data), destination, strip=len(CACHE_ROOT.strip("/").split("/")))


def _blob(made: Path, data: bytes, kind: str) -> dict[str, Any]:
    digest = sha256_bytes(data)
    write_whole(made / "blobs" / "sha256" / digest, data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _read_blob(layout: Path, descriptor: Mapping[str, Any]) -> bytes:
    kind, _, digest = str(descriptor["digest"]).partition(":")
    if kind != "sha256" or len(digest) != 64 or not digest.isalnum():
        raise LayoutInvalid(f"{shown(descriptor['digest'], 80)} is not a sha256 digest")
    path = layout / "blobs" / "sha256" / digest
    data = read_bytes(path, LIMIT)
    if sha256_bytes(data) != digest:
        raise LayoutInvalid(f"blob {digest[:12]}… has other content than its digest says")
    return data


def tar_of(root: Path, place: str) -> bytes:
    """A cache root as an uncompressed tar whose names lie below `place`, the same bytes for the same files.

    The whole path from `/`, parents first, so that no parent directory is made anew by whoever unpacks it.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _members(root, place.strip("/")):
            info = tarfile.TarInfo(name)
            info.mtime = _EPOCH
            if path is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                info.mode, info.size = 0o644, path.stat().st_size
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
    return out.getvalue()


def _members(root: Path, base: str) -> Iterator[tuple[str, Path | None]]:
    parts = base.split("/")
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth]), None
    for path in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).parts):
        name = f"{base}/{path.relative_to(root)}"
        yield name, None if path.is_dir() else path
