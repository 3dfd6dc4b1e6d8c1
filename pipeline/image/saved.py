"""What an image is made of, read from the engine's own export: config digest, diff ids, the last layer's files.

The export is streamed and only small blobs are kept: memory stays bounded whatever the image's size. Both image stores
answer with an OCI layout plus Docker's `manifest.json` (engine 25 and newer).
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import CacheRefused

if TYPE_CHECKING:
    from docker import DockerClient

# A cache layer is some kilobytes; a last layer above this cannot be one, and is not read into memory.
SMALL = 8 * 1024 * 1024


class ExportUnreadable(CacheRefused):
    """The engine's export of the image does not have the expected shape."""


@dataclass(frozen=True)
class SavedImage:
    """`config_digest` is the image's identity; `last`: files in each of its last layers, None for a large one."""

    config_digest: str
    diff_ids: tuple[str, ...]
    last: tuple[tuple[str, ...] | None, ...]


class _Stream(io.RawIOBase):
    """A readable file over the chunks that the engine sends."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks: Iterator[bytes] = iter(chunks)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def small_files(client: DockerClient, image: str) -> dict[str, bytes]:
    """Stream the export of `image` and keep the files in it that are small: names, manifests, config, cache layers."""
    small: dict[str, bytes] = {}
    chunks = client.images.get(image).save(chunk_size=1024 * 1024)
    with tarfile.open(fileobj=io.BufferedReader(_Stream(chunks), 1024 * 1024), mode="r|") as tar:
        for member in tar:
            if member.isfile() and member.size <= SMALL:
                stream = tar.extractfile(member)
                small[member.name] = stream.read() if stream is not None else b""
    return small


def read_saved(client: DockerClient, image: str, *, count: int = 1) -> SavedImage:
    """Stream the export of `image` and list its last `count` layers, the topmost first; raise `ExportUnreadable`."""
    return saved_of(small_files(client, image), image, count=count)


def saved_of(small: Mapping[str, bytes], image: str, *, count: int) -> SavedImage:
    """Like `read_saved`, of an export's small files."""
    try:
        listed = json.loads(small["manifest.json"])[0]
        config = small[listed["Config"]]
        diff_ids = tuple(str(d) for d in json.loads(config)["rootfs"]["diff_ids"])
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ExportUnreadable(
            f"the engine's export of {image} cannot be read: {error!r}", hint="Docker Engine 25 or newer is needed"
        ) from error
    pairs = list(zip(listed["Layers"], diff_ids, strict=True))[-count:]
    names = tuple(_layer_names(small.get(blob), diff_id) for blob, diff_id in reversed(pairs))
    return SavedImage("sha256:" + sha256_bytes(config), diff_ids, names)


def plain(blob: bytes) -> bytes:
    """A layer as the tar that its diff id is of."""
    return gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob


def _layer_names(blob: bytes | None, diff_id: str) -> tuple[str, ...] | None:
    if blob is None:
        return None
    data = plain(blob)
    if "sha256:" + sha256_bytes(data) != diff_id:
        raise ExportUnreadable(f"the last layer's content is not {diff_id[:19]}…, which the config names")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tuple(member.name.lstrip("./") for member in tar if not member.isdir())
