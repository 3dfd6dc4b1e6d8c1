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
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from pipeline.contract.digest import sha256_bytes, sha256_file
from pipeline.contract.text import shown

from .credentials import Credentials
from .descriptors import EMPTY, INDEX, MANIFESTS, OCTETS, Descriptor, Manifest, json_object
from .errors import InvalidResponse, RegistryError
from .http import Answer, Request, RetryPolicy, Transport, joined
from .reference import is_digest

_PAGES = 1000  # of one list: a registry may go on for ever
_BLOB_LIMIT = 64 << 20  # bytes of a blob that is read into memory unless the caller says otherwise
_LIST_TRIES = 5  # how often a list of referrers is written again after somebody else wrote it at the same time
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Registry:
    """One registry, `name` being `host[:port]`.

    `credentials` None reads Docker's configuration (`Credentials.load`); `Credentials()` is nobody. Every method raises
    `RegistryError` or a class below it; `UsageError` where a login cannot be read.
    """

    def __init__(self, name: str, credentials: Credentials | None = None, policy: RetryPolicy | None = None) -> None:
        self.name = name
        self.credentials = Credentials.load() if credentials is None else credentials
        self.policy = policy or RetryPolicy()
        self._http = Transport(name, self.credentials, self.policy)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    # Manifests and tags

    def resolve(self, repository: str, reference: str) -> str | None:
        """The digest that a tag or digest stands for, without reading the manifest; None where there is none."""
        answer = self._manifest("HEAD", repository, reference)
        if answer.status == 404:
            return None
        digest = answer.headers.get("Docker-Content-Digest", "")
        if is_digest(digest):
            return digest
        found = self.manifest(repository, reference)  # a registry that leaves the header out
        return found.digest if found is not None else None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest or index of a tag or digest; None where there is none."""
        answer = self._manifest("GET", repository, reference)
        if answer.status == 404:
            return None
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        return Manifest(answer.body, kind, _checked(answer.body, answer, reference))

    def put_manifest(self, repository: str, manifest: Manifest, tag: str = "") -> str:
        """Store a manifest under its digest, or under a tag, and return its digest.

        Where it has a `subject` and the registry keeps no list of referrers itself, the list under the tag
        `sha256-<hex>` of the subject is kept up to date too.
        """
        answer = self._manifest("PUT", repository, tag or manifest.digest, manifest)
        _checked(manifest.body, answer, tag)
        subject = manifest.json().get("subject")
        if isinstance(subject, dict) and "OCI-Subject" not in answer.headers:
            self._add_to_list(repository, str(subject["digest"]), [manifest.descriptor()])
        return manifest.digest

    def _manifest(self, method: str, repository: str, reference: str, given: Manifest | None = None) -> Answer:
        name = f"{repository}{'@' if is_digest(reference) else ':'}{reference}"
        path = f"/v2/{repository}/manifests/{reference}"
        if given is None:
            headers = {"Accept": ", ".join(MANIFESTS)}
            return self._http.call(Request(method, path, repository, f"read {name}", (200, 404), headers=headers))
        headers = {"Content-Type": given.media_type}
        wanted = Request(method, path, repository, f"push {name}", (200, 201, 202), True, headers, given.body)
        return self._http.call(wanted)

    # Referrers

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """What has `digest` as its subject, of one artifact type or of all, in the registry's order.

        From the registry's own list (OCI 1.1), else from the tag `sha256-<hex>` of older registries. Anyone who may
        push can put anything here.
        """
        pages = list(self._pages(repository, digest))
        if pages:
            found = [Descriptor.from_json(entry) for page in pages for entry in page["manifests"] or ()]
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

    def _pages(self, repository: str, digest: str) -> Iterator[dict[str, Any]]:
        """The indexes of the registry's own list, which may come in pages; nothing where it has no such list."""
        seen: set[str] = set()
        path, what = f"/v2/{repository}/referrers/{digest}", f"list what refers to {digest}"
        while path and path not in seen and len(seen) < _PAGES:
            seen.add(path)
            answer = self._http.call(Request("GET", path, repository, what, (200, 404)))
            if answer.status == 404:
                return
            page = json_object(answer.body, what)
            if page.get("mediaType", INDEX) == INDEX and "manifests" in page:
                yield page
            following = re.search(r'<([^>]*)>[^,]*\brel="?next\b', answer.headers.get("Link", ""))
            path = joined(answer.address, following[1]) if following else ""

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
        for attempt in range(_LIST_TRIES + 1):
            entries = self._read_list(repository, digest)
            known = {entry.digest for entry in entries}
            lacking = [one for one in new if one.digest not in known]
            if not lacking:
                return
            if attempt < _LIST_TRIES:
                listed = [entry.to_json() for entry in (*entries, *lacking)]
                made = {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}
                body = json.dumps(made, separators=(",", ":")).encode()
                self._manifest("PUT", repository, list_tag(digest), Manifest.of(body, INDEX))
        raise RegistryError(
            f"{repository}:{list_tag(digest)} keeps changing: another process writes it", hint="run it again later"
        )

    # Blobs

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self._http.call(_look(repository, digest)).status == 200

    def blob(self, repository: str, digest: str, *, limit: int = _BLOB_LIMIT) -> bytes:
        """A blob's bytes, in memory; raises `InvalidResponse` above `limit` bytes."""
        out = io.BytesIO()
        self.fetch_blob(repository, digest, out, limit=limit)
        return out.getvalue()

    def fetch_blob(self, repository: str, digest: str, out: IO[bytes], *, limit: int) -> None:
        """Write a blob into an open file, which can also be read; raises `InvalidResponse` above `limit` bytes."""
        what = f"read blob {digest[:19]}…"
        path = f"/v2/{repository}/blobs/{digest}"
        self._http.call(Request("GET", path, repository, what, (200,), limit=limit, into=out))
        out.seek(0)
        if f"sha256:{hashlib.file_digest(out, 'sha256').hexdigest()}" != digest:  # type: ignore[arg-type]
            raise InvalidResponse(f"{what}: its content has another digest", hint="is its storage damaged?")

    def put_blob(self, repository: str, blob: bytes | Path, media_type: str = OCTETS) -> Descriptor:
        """Store a blob unless the repository has it, and return what names it; a file is sent without being read whole.

        A try that breaks off is begun anew: what a registry has of half an upload differs from one to the next. It is
        looked up before, since an answer that was lost may have been that of a finished upload.
        """
        digest = "sha256:" + (sha256_bytes(blob) if isinstance(blob, bytes) else sha256_file(blob))
        made = Descriptor(media_type, digest, len(blob) if isinstance(blob, bytes) else blob.stat().st_size)

        def once() -> None:
            if self._http.once(_look(repository, digest)).status == 404:
                self._upload(repository, blob, made)

        self.policy.call(once)
        return made

    def _upload(self, repository: str, blob: bytes | Path, made: Descriptor) -> None:
        what = f"push blob {made.digest[:19]}…"
        place = _upload_place(self._http.once(_begin(repository, what)))
        wanted = Request(
            "PUT",
            f"{place}{'&' if '?' in place else '?'}digest={made.digest}",
            repository,
            what,
            (201, 204),
            True,
            {"Content-Type": OCTETS},
            blob,
            silence=self.policy.commit,  # it copies and hashes the whole blob before it answers
        )
        stored = self._http.once(wanted).headers.get("Docker-Content-Digest", made.digest)
        if stored != made.digest:
            raise InvalidResponse(f"{what}: {self.name} stored {shown(stored, 80)}")

    def check_writable(self, repository: str) -> None:
        """Begin an upload and cancel it: raises what a push would meet, where one may only read for example."""
        place = _upload_place(self._http.call(_begin(repository, f"see whether {repository} may be pushed to")))
        with contextlib.suppress(RegistryError):  # then the registry forgets what nobody goes on with
            self._http.call(Request("DELETE", place, repository, "cancel an upload", (202, 204), True))


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


def _look(repository: str, digest: str) -> Request:
    path = f"/v2/{repository}/blobs/{digest}"
    return Request("HEAD", path, repository, f"look for blob {digest[:19]}…", (200, 404))


def _begin(repository: str, what: str) -> Request:
    return Request("POST", f"/v2/{repository}/blobs/uploads/", repository, what, (202,), True)


def _upload_place(answer: Answer) -> str:
    """Where an upload goes, which may be relative to what was asked."""
    if not answer.headers.get("Location"):
        raise InvalidResponse("the registry began an upload and named no place for it")
    return joined(answer.address, answer.headers["Location"])


def _checked(body: bytes, answer: Answer, reference: str) -> str:
    """The digest of a manifest's bytes, which must be the one asked for and the one that the registry names."""
    digest = f"sha256:{sha256_bytes(body)}"
    named = answer.headers.get("Docker-Content-Digest", digest)
    if digest != named or (is_digest(reference) and digest != reference):
        wanted = reference if is_digest(reference) else named
        raise InvalidResponse(
            f"manifest {shown(wanted, 80)} has other content: {digest}", hint="is its storage damaged?"
        )
    return digest
