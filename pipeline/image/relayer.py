"""Replacing the last layers of an image, or adding one, without building it: everything below stays as it is.

The engine is given an archive that holds the new configuration and the new layers alone. The layers below are named
there by their diff ids (classic store) and by their blobs' digests (containerd store); the engine has them already.
"""

from __future__ import annotations

import copy
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import BuildError
from pipeline.daemon.look import Look

from .buildkit import Builder, Stage
from .peek import peek
from .saved import ExportUnreadable, plain, small_files

if TYPE_CHECKING:
    from docker import DockerClient

_LAYER = b"FROM scratch AS layer\nCOPY --link --from=tuned / /\n"
_OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class LoadFailed(BuildError):
    """The engine did not take the new image."""


def layer_of(client: DockerClient, builder: Builder, staged: Path) -> bytes:
    """The layer that baking a staged key gives, as a tar: made by the same builder, so that its diff id is the same."""
    from dataclasses import replace

    built = replace(builder, dockerfile=_LAYER).build(Stage("layer", contexts={"tuned": staged}))
    try:
        files = small_files(client, built.image_id)
        (name,) = json.loads(files["manifest.json"])[0]["Layers"]
        return plain(files[name])
    except (KeyError, ValueError, IndexError) as error:
        raise ExportUnreadable(f"the engine's export of a layer cannot be read: {error!r}") from error
    finally:
        client.images.remove(built.image_id, force=True)


def changed_config(
    config: Mapping[str, Any], *, drop: int, diff_ids: Sequence[str], labels: Mapping[str, str], said: str
) -> dict[str, Any]:
    """An image's configuration without its last `drop` layers and with further ones; all else but labels is kept."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    layers = list(made["rootfs"]["diff_ids"])
    made["rootfs"]["diff_ids"] = [*layers[: len(layers) - drop], *diff_ids]
    history = list(made.get("history") or ())
    if history:
        filled = [at for at, step in enumerate(history) if not step.get("empty_layer")]
        gone = set(filled[len(filled) - drop :]) if drop else set()
        kept = [step for at, step in enumerate(history) if at not in gone]
        new = {"created": made.get("created", ""), "created_by": said, "comment": "tuned-image-pipeline"}
        made["history"] = [*kept, *(dict(new) for _ in diff_ids)]
    inside = made.setdefault("config", {})
    inside["Labels"] = {**(inside.get("Labels") or {}), **labels}
    return made


def relayer(
    client: DockerClient, image: str, *, drop: int, layers: Sequence[bytes], labels: Mapping[str, str], said: str,
    look: Look,
) -> str:  # fmt: skip
    """Make an image from `image` without its last `drop` layers and with `layers`; return its id. It has no name."""
    files = (peek(client, image, count=0) if look is Look.PUSHED else None) or small_files(client, image)
    try:
        listed = json.loads(files["manifest.json"])[0]
        config = json.loads(files[listed["Config"]])
        blobs = _descriptors(files, len(listed["Layers"]))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ExportUnreadable(
            f"the engine's export of {image} cannot be read: {error!r}", hint="Docker Engine 25 or newer is needed"
        ) from error
    diff_ids = [f"sha256:{sha256_bytes(data)}" for data in layers]
    made = changed_config(config, drop=drop, diff_ids=diff_ids, labels=labels, said=said)
    data = archive(made, [*blobs[: len(blobs) - drop]], layers, media=_media(files))
    from docker.errors import DockerException

    try:
        (loaded,) = client.images.load(data)
    except (DockerException, ValueError) as error:
        raise LoadFailed(
            f"the engine did not take the new layers: {str(error)[:300]}",
            hint="the image is as it was; `pipeline build` builds it anew",
        ) from error
    found = [str(one) for one in loaded.attrs["RootFS"]["Layers"]]
    if found != made["rootfs"]["diff_ids"]:
        client.images.remove(str(loaded.id), force=True)
        raise LoadFailed("the engine put other layers into the new image than it was given")
    return str(loaded.id)


def _descriptors(files: Mapping[str, bytes], count: int) -> list[dict[str, Any]]:
    """The layers as the OCI manifest of the export names them; empty ones for an export that has none."""
    manifest = _manifest(files)
    if manifest is None:
        return [{} for _ in range(count)]
    return [dict(one) for one in manifest["layers"]]


def _media(files: Mapping[str, bytes]) -> str:
    """The media type of the image's manifest, which its layers' types go with."""
    manifest = _manifest(files) or {}
    return str(manifest.get("mediaType") or _OCI_MANIFEST)


def _manifest(files: Mapping[str, bytes]) -> dict[str, Any] | None:
    for entry in json.loads(files.get("index.json", b'{"manifests": []}'))["manifests"]:
        blob = files.get(f"blobs/sha256/{entry['digest'].partition(':')[2]}")
        value: dict[str, Any] = json.loads(blob) if blob else {}
        if "layers" in value:
            return value
    return None


def archive(
    config: Mapping[str, Any], below: Sequence[Mapping[str, Any]], layers: Sequence[bytes], *, media: str
) -> bytes:
    """What the engine loads: Docker's manifest.json and an OCI layout side by side, without the blobs `below`."""
    files: dict[str, bytes] = {}

    def blob(data: bytes) -> tuple[str, str]:
        digest = sha256_bytes(data)
        files[f"blobs/sha256/{digest}"] = data
        return f"blobs/sha256/{digest}", f"sha256:{digest}"

    text = json.dumps(config, separators=(",", ":"), sort_keys=True).encode()
    place, digest = blob(text)
    docker = "docker" in media
    kinds = (
        ("application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar")
        if docker
        else (_OCI_CONFIG, _OCI_LAYER)
    )
    places, descriptors = [], []
    diff_ids = config["rootfs"]["diff_ids"]
    for one, diff_id in zip(below, diff_ids, strict=False):
        places.append(f"blobs/sha256/{str(one.get('digest') or diff_id).partition(':')[2]}")
        descriptors.append(dict(one))
    for data in layers:
        where, named = blob(data)
        places.append(where)
        descriptors.append({"mediaType": kinds[1], "digest": named, "size": len(data)})
    if all(descriptors):
        manifest = {
            "schemaVersion": 2, "mediaType": media,
            "config": {"mediaType": kinds[0], "digest": digest, "size": len(text)}, "layers": descriptors,
        }  # fmt: skip
        spelled = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
        _, named = blob(spelled)
        entry = {"mediaType": media, "digest": named, "size": len(spelled)}
        files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["manifest.json"] = json.dumps([{"Config": place, "RepoTags": None, "Layers": places}]).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
