"""A registry as the OCI distribution specification 1.1 has it: blobs, manifests, tags, referrers.

    with Registry("registry.example.com") as registry:
        found = registry.manifest("team/model", "latest")

Everything read is checked against its digest, and every operation is repeated as `RetryPolicy` has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import requests

from pipeline.contract.digest import sha256_bytes, sha256_file

from .credentials import Credentials
from .descriptors import EMPTY, INDEX, MANIFESTS, OCTETS, Descriptor, Manifest
from .errors import InvalidResponse, RegistryError, TransientError, printable
from .http import RetryPolicy, Transport, blocks, joined, read
from .reference import is_digest

_PAGES = 1000  # of one list: a registry may go on for ever
_MANIFEST_LIMIT = 4 << 20  # bytes; what registries take, by the specification
_BLOB_LIMIT = 64 << 20  # bytes of a blob that is read into memory unless the caller says otherwise
_LIST_TRIES = 5  # how often a list of referrers is written again after somebody else wrote it at the same time
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Registry:
    """One registry, `name` being `host[:port]`.

    `credentials` None reads Docker's configuration (`Credentials.load`); `Credentials()` is nobody. Every method raises
    `RegistryError` or a class below it; `CredentialsInvalid` where a login cannot be read.
    """

    def __init__(self, name: str, credentials: Credentials | None = None, policy: RetryPolicy | None = None) -> None:
        self.name = name
        self.credentials = Credentials.load() if credentials is None else credentials
        self.policy = policy or RetryPolicy()
        self._http = Transport(name, self.credentials, self.policy)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # Manifests and tags

    def resolve(self, repository: str, reference: str) -> str | None:
        """The digest that a tag or digest stands for, without reading the manifest; None where there is none."""

        def once() -> str | None:
            with self._read_manifest("HEAD", repository, reference) as response:
                return None if response.status_code == 404 else response.headers.get("Docker-Content-Digest", "")

        digest = self.policy.call(once)
        if digest is None or is_digest(digest):
            return digest
        found = self.manifest(repository, reference)  # a registry that leaves the header out
        return found.digest if found is not None else None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest or index of a tag or digest; None where there is none."""

        def once() -> Manifest | None:
            with self._read_manifest("GET", repository, reference) as response:
                if response.status_code == 404:
                    return None
                body = read(response, _MANIFEST_LIMIT, self.policy)
                kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
                return Manifest(body, kind, _checked(body, response, reference))

        return self.policy.call(once)

    def put_manifest(self, repository: str, manifest: Manifest, tag: str = "") -> str:
        """Store a manifest under its digest, or under a tag, and return its digest.

        Where it has a `subject` and the registry keeps no list of referrers itself, the list under the tag
        `sha256-<hex>` of the subject is kept up to date too.
        """
        listed = self._put(repository, tag or manifest.digest, manifest)
        subject = manifest.json().get("subject")
        if isinstance(subject, dict) and not listed:
            self._add_to_list(repository, str(subject["digest"]), [manifest.descriptor()])
        return manifest.digest

    def _put(self, repository: str, reference: str, manifest: Manifest) -> bool:
        """Store one manifest; whether the registry lists what refers to others itself, and so says `OCI-Subject`."""

        def once() -> bool:
            with self._http.request(
                "PUT",
                f"/v2/{repository}/manifests/{reference}",
                repository=repository,
                push=True,
                what=f"push {_named(repository, reference)}",
                accept=(200, 201, 202),
                headers={"Content-Type": manifest.media_type},
                body=manifest.body,
            ) as response:
                _checked(manifest.body, response, reference)
                return "OCI-Subject" in response.headers

        return self.policy.call(once)

    def _read_manifest(
        self, method: str, repository: str, reference: str
    ) -> contextlib.AbstractContextManager[requests.Response]:
        return self._http.request(
            method,
            f"/v2/{repository}/manifests/{reference}",
            repository=repository,
            what=f"read {_named(repository, reference)}",
            accept=(200, 404),
            headers={"Accept": ", ".join(MANIFESTS)},
        )

    # Referrers

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """What has `digest` as its subject, of one artifact type or of all, in the registry's order.

        From the registry's own list (OCI 1.1), else from the tag `sha256-<hex>` of older registries. Anyone who may
        push can put anything here.
        """
        pages = list(self._pages(f"/v2/{repository}/referrers/{digest}", repository, f"list what refers to {digest}"))
        known = [page for page in pages if page.get("mediaType", INDEX) == INDEX and "manifests" in page]
        if known:
            listed = [entry for page in known for entry in (page["manifests"] or ())]
            found = [Descriptor.from_json(entry) for entry in listed]
        else:
            found = list(self._read_list(repository, digest))
        whole = [self._described(repository, one) for one in found]
        return tuple(one for one in whole if artifact_type is None or one.artifact_type == artifact_type)

    def _described(self, repository: str, listed: Descriptor) -> Descriptor:
        """A referrer with its artifact type, which some lists do not know (seen: go-containerregistry 0.20)."""
        if listed.artifact_type not in ("", EMPTY):
            return listed
        found = self.manifest(repository, listed.digest)
        return found.descriptor() if found is not None else listed

    def _pages(self, path: str, repository: str, what: str) -> Iterator[dict[str, Any]]:
        """The JSON objects of a list that a registry may give in pages; nothing where it has no such list."""
        seen: set[str] = set()
        while path and path not in seen and len(seen) < _PAGES:
            seen.add(path)

            def once(path: str = path) -> tuple[dict[str, Any], str]:
                with self._http.request("GET", path, repository=repository, what=what, accept=(200, 404)) as response:
                    if response.status_code == 404:
                        return {}, ""
                    body = read(response, _MANIFEST_LIMIT, self.policy)
                    following = response.links.get("next", {}).get("url", "")
                    return Manifest(body, "", what).json(), joined(response, following) if following else ""

            page, path = self.policy.call(once)
            if page:
                yield page

    def _read_list(self, repository: str, digest: str) -> tuple[Descriptor, ...]:
        found = self.manifest(repository, list_tag(digest))
        if found is None:
            return ()
        if found.media_type != INDEX:
            raise InvalidResponse(f"{repository}:{list_tag(digest)} is not a list of referrers")
        return found.entries("manifests")

    def _add_to_list(self, repository: str, digest: str, new: Sequence[Descriptor]) -> None:
        """Put all of `new` that it lacks into the list of `digest`.

        The registry has no lock: the list is read again afterwards, and written again where somebody else's write took
        our entries away.
        """
        for _ in range(_LIST_TRIES):
            entries = self._read_list(repository, digest)
            known = {entry.digest for entry in entries}
            lacking = [one for one in new if one.digest not in known]
            if not lacking:
                return
            listed = [entry.to_json() for entry in (*entries, *lacking)]
            made = {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}
            body = json.dumps(made, separators=(",", ":")).encode()
            self._put(repository, list_tag(digest), Manifest.of(body, INDEX))
        known = {entry.digest for entry in self._read_list(repository, digest)}
        if any(one.digest not in known for one in new):
            raise RegistryError(
                f"{repository}:{list_tag(digest)} is written by somebody else all the time", hint="run it again later"
            )

    # Blobs

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has a blob."""

        def once() -> bool:
            with self._http.request(
                "HEAD",
                f"/v2/{repository}/blobs/{digest}",
                repository=repository,
                what=f"look for blob {digest[:19]}…",
                accept=(200, 404),
            ) as response:
                return response.status_code == 200

        return self.policy.call(once)

    def blob(self, repository: str, digest: str, *, limit: int = _BLOB_LIMIT) -> bytes:
        """A blob's bytes, in memory; raises `InvalidResponse` above `limit` bytes."""
        out = io.BytesIO()
        self._fetch(repository, digest, out, limit)
        return out.getvalue()

    def save_blob(self, repository: str, digest: str, path: Path, *, limit: int | None = None) -> Path:
        """Write a blob to `path`, whole or not at all, in memory that does not depend on its size; return `path`."""
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

    def put_blob(self, repository: str, blob: bytes | Path, media_type: str = OCTETS) -> Descriptor:
        """Store a blob unless the repository has it, and return what names it; a file is sent without being read whole.

        A try that breaks off is begun anew: what a registry has of half an upload differs from one to the next. It is
        looked up before, since an answer that was lost may have been that of a finished upload.
        """
        digest = "sha256:" + (sha256_bytes(blob) if isinstance(blob, bytes) else sha256_file(blob))
        made = Descriptor(media_type, digest, len(blob) if isinstance(blob, bytes) else blob.stat().st_size)

        def once() -> None:
            if not self.has_blob(repository, digest):
                self._upload(repository, blob, made)

        self.policy.call(once)
        return made

    def check_writable(self, repository: str) -> None:
        """Begin an upload and cancel it: raises what a push would meet, where one may only read for example."""

        def begin() -> str:
            with self._begin(repository, f"see whether {repository} may be pushed to") as response:
                return joined(response, response.headers.get("Location", ""))

        place = self.policy.call(begin)
        with (  # where that fails the registry forgets what nobody goes on with
            contextlib.suppress(RegistryError, TransientError),
            self._http.request(
                "DELETE", place, repository=repository, push=True, what="cancel an upload", accept=(202, 204)
            ),
        ):
            pass

    def _begin(self, repository: str, what: str) -> contextlib.AbstractContextManager[requests.Response]:
        path = f"/v2/{repository}/blobs/uploads/"
        return self._http.request("POST", path, repository=repository, push=True, what=what, accept=(202,), body=b"")

    def _fetch(self, repository: str, digest: str, out: IO[bytes], limit: int | None) -> None:
        def once() -> None:
            out.seek(0)
            out.truncate()
            what = f"read blob {digest[:19]}…"
            path = f"/v2/{repository}/blobs/{digest}"
            with self._http.request("GET", path, repository=repository, what=what, accept=(200,)) as response:
                seen = hashlib.sha256()
                for block in blocks(response, limit, self.policy):
                    seen.update(block)
                    out.write(block)
            if f"sha256:{seen.hexdigest()}" != digest:
                raise InvalidResponse(f"{what}: its content has another digest", hint="is its storage damaged?")

        self.policy.call(once)

    def _upload(self, repository: str, blob: bytes | Path, made: Descriptor) -> None:
        what = f"push blob {made.digest[:19]}…"
        with self._begin(repository, what) as response:
            place = _upload_address(response, made.digest)
        with contextlib.ExitStack() as stack:
            body: bytes | IO[bytes]
            if isinstance(blob, bytes) or made.size == 0:  # requests would send an empty file in chunks
                body = blob if isinstance(blob, bytes) else b""
            else:
                body = stack.enter_context(blob.open("rb"))
            response = stack.enter_context(
                self._http.request(
                    "PUT",
                    place,
                    repository=repository,
                    push=True,
                    what=what,
                    accept=(201, 204),
                    headers={"Content-Type": OCTETS},
                    body=body,
                    silence=self.policy.commit,  # it copies and hashes the whole blob before it answers
                )
            )
            stored = response.headers.get("Docker-Content-Digest", made.digest)
            if stored != made.digest:
                raise InvalidResponse(f"{what}: {self.name} stored {printable(stored, 80)}")


def list_tag(digest: str) -> str:
    """The tag that holds the list of what refers to `digest`, where the registry has no list of its own."""
    return digest.replace(":", "-", 1)


def parallel_map(work: Callable[[_Item], _Result], items: Iterable[_Item], workers: int) -> list[_Result]:
    """`work` of every item, in their order; the first error is raised once nothing runs any more.

    An interruption does not wait: what the threads do can be begun again, and may wait for a registry for minutes.
    """
    pool = ThreadPoolExecutor(workers)
    wait = True
    try:
        return list(pool.map(work, items))
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def _named(repository: str, reference: str) -> str:
    return f"{repository}{'@' if is_digest(reference) else ':'}{reference}"


def _checked(body: bytes, response: requests.Response, reference: str) -> str:
    """The digest of a manifest's bytes, which must be the one asked for and the one that the registry names."""
    digest = f"sha256:{sha256_bytes(body)}"
    named = response.headers.get("Docker-Content-Digest", digest)
    if digest != named or (is_digest(reference) and digest != reference):
        wanted = reference if is_digest(reference) else named
        raise InvalidResponse(
            f"manifest {printable(wanted, 80)} has other content: {digest}", hint="is its storage damaged?"
        )
    return digest


def _upload_address(response: requests.Response, digest: str) -> str:
    """Where an upload goes: the answer's Location, which may be relative, with the digest added."""
    if not response.headers.get("Location"):
        raise InvalidResponse("the registry began an upload and named no place for it")
    place = urlsplit(joined(response, response.headers["Location"]))
    query = urlencode([*parse_qsl(place.query, keep_blank_values=True), ("digest", digest)])
    return urlunsplit((place.scheme, place.netloc, place.path, query, ""))
