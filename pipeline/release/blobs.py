"""The blobs of a registry: looked for, read and written, in memory that does not depend on their size."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import IO
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import requests

from pipeline.cache.finding import shown
from pipeline.contract.digest import sha256_bytes, sha256_file
from pipeline.contract.errors import PublishError

from . import media
from .bodies import blocks
from .descriptors import Descriptor
from .errors import AnswerInvalid, DigestMismatch
from .patience import Passing, Patience
from .transport import Transport, joined, scope_of

_BLOB_LIMIT = 64 * 1024 * 1024  # bytes of a blob that is read into memory unless the caller says otherwise


class Blobs:
    """The part of `Registry` that deals in blobs."""

    host: str
    patience: Patience
    _http: Transport

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has a blob."""

        def once() -> bool:
            path, scope = f"/v2/{repository}/blobs/{digest}", scope_of(repository)
            with self._http.request(
                "HEAD", path, scope=scope, what=f"look for blob {digest[:19]}…", accept=(200, 404)
            ) as response:
                return response.status_code == 200

        return self.patience.insist(once)

    def blob(self, repository: str, digest: str, *, limit: int = _BLOB_LIMIT) -> bytes:
        """A blob's bytes, in memory. Raises `NotInRegistry`, `BlobBroken` above `limit` bytes, `DigestMismatch`."""
        out = io.BytesIO()
        self._fetch(repository, digest, out, limit)
        return out.getvalue()

    def save_blob(self, repository: str, digest: str, path: Path, *, limit: int | None = None) -> Path:
        """Write a blob to `path`, whole or not at all, in memory that does not depend on its size; return `path`.

        Raises `NotInRegistry`, `BlobBroken` above `limit` bytes, `DigestMismatch`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as out:
                self._fetch(repository, digest, out, limit)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    def put_blob(self, repository: str, blob: bytes | Path, media_type: str = media.OCTETS) -> Descriptor:
        """Store a blob unless the repository has it, and return what names it; a file is sent without being read whole.

        A try that breaks off is begun anew: what a registry has of half an upload differs from one to the next.
        """
        digest = "sha256:" + (sha256_bytes(blob) if isinstance(blob, bytes) else sha256_file(blob))
        made = Descriptor(media_type, digest, len(blob) if isinstance(blob, bytes) else blob.stat().st_size)
        if not self.has_blob(repository, digest):
            self.patience.insist(lambda: self._upload(repository, blob, made))
        return made

    def check_writable(self, repository: str) -> None:
        """Begin an upload and cancel it: raises what a push would meet, such as `Refused` where one may only read."""

        def begin() -> str:
            with self._begun(repository, f"see whether {repository} may be pushed to") as response:
                return joined(response, response.headers.get("Location", ""))

        place, what = self.patience.insist(begin), "cancel an upload"
        with (  # where that fails the registry forgets what nobody goes on with
            contextlib.suppress(PublishError, Passing),
            self._http.request("DELETE", place, scope=scope_of(repository, push=True), what=what, accept=(202, 204)),
        ):
            pass

    def _begun(self, repository: str, what: str) -> contextlib.AbstractContextManager[requests.Response]:
        """The answer to the request that begins an upload."""
        return self._http.request(
            "POST",
            f"/v2/{repository}/blobs/uploads/",
            scope=scope_of(repository, push=True),
            what=what,
            accept=(202,),
            body=b"",
        )

    def _fetch(self, repository: str, digest: str, out: IO[bytes], limit: int | None) -> None:
        def once() -> None:
            out.seek(0)
            out.truncate()
            what = f"read blob {digest[:19]}…"
            with self._http.request(
                "GET", f"/v2/{repository}/blobs/{digest}", scope=scope_of(repository), what=what, accept=(200,)
            ) as response:
                seen = hashlib.sha256()
                for block in blocks(response, limit, self.patience.whole):
                    seen.update(block)
                    out.write(block)
            if f"sha256:{seen.hexdigest()}" != digest:
                raise DigestMismatch(
                    f"{what}: its content has another digest", hint="the registry's storage is damaged"
                )

        self.patience.insist(once)

    def _upload(self, repository: str, blob: bytes | Path, made: Descriptor) -> None:
        scope, what = scope_of(repository, push=True), f"push blob {made.digest[:19]}…"
        with self._begun(repository, what) as response:
            place = _location(response, made.digest)
        with contextlib.ExitStack() as stack:
            body: bytes | IO[bytes]
            if isinstance(blob, bytes) or made.size == 0:  # requests would send an empty file in chunks
                body = blob if isinstance(blob, bytes) else b""
            else:
                body = stack.enter_context(blob.open("rb"))
            sent = self._http.request(
                "PUT",
                place,
                scope=scope,
                what=what,
                accept=(201, 204),
                headers={"Content-Type": media.OCTETS},
                body=body,
            )
            response = stack.enter_context(sent)
            stored = response.headers.get("Docker-Content-Digest", made.digest)
            if stored != made.digest:
                raise DigestMismatch(f"{what}: {self.host} stored {shown(stored, 80)}")


def _location(response: requests.Response, digest: str) -> str:
    """Where an upload goes: the answer's Location, which may be relative, with the digest added."""
    place = urlsplit(joined(response, response.headers.get("Location", "")))
    if not response.headers.get("Location"):
        raise AnswerInvalid("the registry began an upload and named no place for it")
    query = urlencode([*parse_qsl(place.query, keep_blank_values=True), ("digest", digest)])
    return urlunsplit((place.scheme, place.netloc, place.path, query, ""))
