"""The small files of an image's export without the export: the engine pushes the image to a registry of ours.

The first push shows the manifests, of which nothing but digests and sizes is taken; for the second the registry lacks
the configurations and the last layers, which the engine then uploads. It is for engines whose image store holds
blobs, containerd's, and whose loopback is ours. A push needs a name: the image has one more for a second.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import log

from .contain import Sandbox, created
from .peekregistry import Registry, serving
from .saved import SMALL

if TYPE_CHECKING:
    from docker import DockerClient

_TAG = "look"
_SILENCE = 10  # s that the engine may say nothing while it pushes
_LIMIT = 20.0  # s, for one push


class NoPeek(Exception):
    """The engine did not push as it should; its export tells the same."""


@dataclass(frozen=True)
class _Manifest:
    """One image's manifest: its bytes, and descriptors of its configuration and its layers, bottom first."""

    digest: str
    data: bytes
    config: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]

    def last(self, count: int) -> Iterator[Mapping[str, Any]]:
        """Those of the last `count` layers that may be a cache's."""
        for layer in self.layers[max(0, len(self.layers) - count) :]:
            if int(layer["size"]) <= SMALL:
                yield layer


def peek(client: DockerClient, image: str, *, count: int) -> dict[str, bytes] | None:
    """Like `small_files`, with no layers but the last `count`; None when the engine does not play along."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        return look(client, image, count=count)
    except (NoPeek, DockerException, RequestException, OSError):
        return None


def look(client: DockerClient, image: str, *, count: int) -> dict[str, bytes]:
    """As `peek`, but raise `NoPeek` or the SDK's error for the reason. Seconds at the most, and no trace is left."""
    found: Mapping[str, Any] = client.images.get(image).attrs
    wanted = (found.get("Os"), found.get("Architecture"), found["RootFS"]["Layers"])  # the engine's own platform
    top = str((found.get("Descriptor") or {}).get("digest") or found["Id"])
    registry = Registry(f"tuned-image-pipeline/look-{secrets.token_hex(16)}", top)
    with serving(registry) as repository, _named(client, image, repository), _impatient(client):
        try:
            said = _push(client, repository)
            manifests = list(_candidates(registry.manifests, len(wanted[2])))
            if not manifests:
                raise NoPeek(f"no manifest of {len(wanted[2])} layers came: {said}")
            blobs = [blob for one in manifests for blob in (one.config, *one.last(count))]
            registry.want({str(blob["digest"]): int(blob["size"]) for blob in blobs if int(blob["size"]) <= SMALL})
            said = _push(client, repository)
            fitting = [one for one in manifests if _told(registry.blobs.get(one.config["digest"])) == wanted]
            if len(fitting) != 1:
                raise NoPeek(f"{len(fitting)} of {len(manifests)} manifests have the image's layers: {said}")
            return _files(fitting[0], registry.blobs, count)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NoPeek(f"a manifest or a configuration has not the expected shape: {error!r}") from error


@contextlib.contextmanager
def _named(client: DockerClient, image: str, repository: str) -> Iterator[None]:
    """Give the image one more name; an image that had none, has none afterwards, and is there.

    A container holds it meanwhile: of an image that is in use the engine takes away the last name and keeps the image.
    """
    made = False
    with created(client, image, ["true"], Sandbox()):
        try:
            client.images.get(image).tag(repository, _TAG)
            made = True
            yield
        finally:
            try:
                _untag(client, f"{repository}:{_TAG}", patience=0.0 if made else 2.0)
            except BaseException:  # an interrupt in the midst of it
                _untag(client, f"{repository}:{_TAG}", patience=0.0)
                raise


def _untag(client: DockerClient, name: str, *, patience: float) -> None:
    """Take the name away; wait `patience` seconds for one that the engine may be about to give."""
    from docker.errors import DockerException, NotFound
    from requests.exceptions import RequestException

    until = time.monotonic() + patience
    while True:
        try:
            client.images.remove(name, force=True, noprune=True)
        except NotFound:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
        except (DockerException, RequestException) as error:
            log.warn(f"the engine keeps the name {name}, which was to be there for a second: {error}")
        return


@contextlib.contextmanager
def _impatient(client: DockerClient) -> Iterator[None]:
    """Wait less long for each answer of the engine than usual."""
    usual = client.api.timeout
    client.api.timeout = _SILENCE
    try:
        yield
    finally:
        client.api.timeout = usual


def _push(client: DockerClient, repository: str) -> str:
    """Push, and return what the engine says of why that failed; raise `NoPeek` when it says nothing or no end."""
    from docker.errors import StreamParseError
    from urllib3.exceptions import HTTPError

    said = ""
    until = time.monotonic() + _LIMIT
    try:
        for line in client.images.push(repository, tag=_TAG, auth_config={}, stream=True, decode=True):
            said = str(line.get("error") or said)
            if time.monotonic() > until:
                raise NoPeek(f"the push took longer than {_LIMIT:.0f} s")
    except (HTTPError, StreamParseError) as error:
        raise NoPeek(f"the engine's answer to the push was cut off: {error}") from error
    return said


def _candidates(manifests: Mapping[str, bytes], layers: int) -> Iterator[_Manifest]:
    """The manifests that may be the image's; an index and an attestation have other layers, or none."""
    for digest, data in list(manifests.items()):
        value = json.loads(data)
        if len(value.get("layers", ())) == layers and "in-toto" not in str(value["layers"][-1]["mediaType"]):
            yield _Manifest(digest, data, value["config"], tuple(value["layers"]))


def _told(config: bytes | None) -> tuple[object, ...]:
    """Operating system, architecture and diff ids by a configuration; empty for one that did not come."""
    value = json.loads(config) if config else None
    return (value["os"], value["architecture"], value["rootfs"]["diff_ids"]) if value else ()


def _files(manifest: _Manifest, blobs: Mapping[str, bytes], count: int) -> dict[str, bytes]:
    """What was seen, under the names that it has in an export."""
    entry = {
        "mediaType": json.loads(manifest.data).get("mediaType"), "digest": manifest.digest, "size": len(manifest.data),
    }  # fmt: skip
    listed = {"Config": _place(manifest.config["digest"]), "Layers": [_place(one["digest"]) for one in manifest.layers]}
    files = {
        "manifest.json": json.dumps([listed]).encode(),
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        _place(manifest.digest): manifest.data,
    }
    for one in (manifest.config, *manifest.last(count)):
        if one["digest"] not in blobs:
            raise NoPeek(f"{one['digest']} did not come")
        files[_place(one["digest"])] = blobs[one["digest"]]
    return files


def _place(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
