"""Reading what a registry sends: bounded in bytes and seconds, whole or an error, and checked against its digest."""

from __future__ import annotations

import time
from collections.abc import Iterator

import requests

from pipeline.cache.finding import shown
from pipeline.contract.digest import sha256_bytes

from .errors import BlobBroken, DigestMismatch, RegistrySilent
from .patience import Passing
from .reference import is_digest

_BLOCK = 1 << 20


def blocks(response: requests.Response, limit: int | None, whole: float) -> Iterator[bytes]:
    """The body in blocks. Raises `BlobBroken` above `limit` bytes or when less comes than was announced."""
    began, size = time.monotonic(), 0
    # read1: what has come, however little, so that the clock is looked at while a registry sends byte by byte
    while block := response.raw.read1(_BLOCK, decode_content=False):
        size += len(block)
        if limit is not None and size > limit:
            raise BlobBroken(f"what the registry sends is larger than {limit:,} bytes", hint="nothing of ours is")
        if time.monotonic() - began > whole:
            raise RegistrySilent(
                f"the registry needs longer than {whole:.0f} s for one blob", hint="run it again later"
            )
        yield block
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and "Content-Encoding" not in response.headers and size != int(announced):
        raise Passing(BlobBroken(f"{size} of {announced} bytes came", hint="run it again"))


def read(response: requests.Response, limit: int, whole: float) -> bytes:
    """The whole body, in memory; raises as `blocks` does."""
    return b"".join(blocks(response, limit, whole))


def checked(body: bytes, response: requests.Response, reference: str) -> str:
    """The digest of a manifest's bytes, which must be the one asked for and the one that the registry names."""
    digest = f"sha256:{sha256_bytes(body)}"
    named = response.headers.get("Docker-Content-Digest", digest)
    if digest != named or (is_digest(reference) and digest != reference):
        wanted = reference if is_digest(reference) else named
        raise DigestMismatch(
            f"manifest {shown(wanted, 80)} has other content: {digest}", hint="the registry's storage is damaged"
        )
    return digest
