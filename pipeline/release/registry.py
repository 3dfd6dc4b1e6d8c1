"""A registry as the OCI distribution specification 1.1 has it: blobs, manifests, tags, referrers.

    with Registry("127.0.0.1:5000") as registry:
        found = registry.manifest("team/model", "latest")

Everything read is checked against its digest; every operation is repeated within the bounds of `Patience`; each failure
is one class of `errors`, all with exit code 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import requests

from pipeline.contract.digest import sha256_bytes

from . import media
from .blobs import Blobs
from .bodies import checked, read
from .credentials import Credentials
from .descriptors import Descriptor, Manifest
from .patience import Patience
from .reference import is_digest
from .referrers import add_to_list, read_list
from .transport import Transport, joined, scope_of

__all__ = ["Descriptor", "Manifest", "Registry"]

_PAGES = 1000  # of one list: a registry may go on for ever
_MANIFEST_LIMIT = 4 * 1024 * 1024  # bytes; what registries take, by the specification


class Registry(Blobs):
    """One registry, `host` being `name[:port]`.

    Plain HTTP on the loopback unless Docker's certs.d names it, else TLS. `credentials` None reads Docker's
    configuration (`Credentials.load()`, which may raise `CredentialsUnreadable`); `Credentials()` is nobody.
    Every method raises a `PublishError`: `Unauthorized`, `Refused`, `RegistryFull`, `TooManyRequests`,
    `RegistryBroken`, `RegistrySilent`, `TlsFailed`, `AnswerInvalid`; further ones are named where they occur.
    """

    def __init__(self, host: str, credentials: Credentials | None = None, patience: Patience | None = None) -> None:
        self.host = host
        self.patience = patience or Patience()
        self.credentials = Credentials.load() if credentials is None else credentials
        self._http = Transport(host, self.credentials, self.patience)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def resolve(self, repository: str, reference: str) -> str | None:
        """The digest that a tag or digest stands for, without reading the manifest; None where there is none."""

        def once() -> str | None:
            with self._manifest_request("HEAD", repository, reference) as response:
                if response.status_code == 404:
                    return None
                return response.headers.get("Docker-Content-Digest", "")

        digest = self.patience.insist(once)
        if digest is None or is_digest(digest):
            return digest
        found = self.manifest(repository, reference)  # a registry that leaves the header out
        return found.digest if found is not None else None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest or index of a tag or digest; None where there is none. Raises `DigestMismatch`."""

        def once() -> Manifest | None:
            with self._manifest_request("GET", repository, reference) as response:
                if response.status_code == 404:
                    return None
                body = read(response, _MANIFEST_LIMIT, self.patience.whole)
                kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
                return Manifest(body, kind, checked(body, response, reference))

        return self.patience.insist(once)

    def put_manifest(self, repository: str, reference: str, body: bytes, media_type: str) -> str:
        """Store a manifest under a tag or its digest, and return its digest.

        Where it has a `subject` and the registry keeps no list of referrers itself, the list under the tag
        `sha256-<hex>` of the subject is kept up to date too. Raises `DigestMismatch`.
        """
        listed = self._put(repository, reference, body, media_type)
        made = Manifest(body, media_type, f"sha256:{sha256_bytes(body)}")
        subject = made.json().get("subject")
        if isinstance(subject, dict) and not listed:
            add_to_list(self, repository, str(subject["digest"]), [made.descriptor()])
        return made.digest

    def put_referrers(self, repository: str, subject: str, manifests: Sequence[Manifest]) -> None:
        """Store manifests that all have the digest `subject` as their subject; a list is written once for all of them.

        Raises `DigestMismatch`.
        """
        listed = [self._put(repository, one.digest, one.body, one.media_type) for one in manifests]
        left = [one.descriptor() for one, known in zip(manifests, listed, strict=True) if not known]
        if left:
            add_to_list(self, repository, subject, left)

    def _put(self, repository: str, reference: str, body: bytes, media_type: str) -> bool:
        """Store one manifest; whether the registry lists what refers to others itself, and so says `OCI-Subject`."""

        def once() -> bool:
            with self._http.request(
                "PUT",
                f"/v2/{repository}/manifests/{reference}",
                scope=scope_of(repository, push=True),
                what=f"push {repository}{'@' if is_digest(reference) else ':'}{reference}",
                accept=(200, 201, 202),
                headers={"Content-Type": media_type},
                body=body,
            ) as response:
                checked(body, response, reference)
                return "OCI-Subject" in response.headers

        return self.patience.insist(once)

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository, sorted; none where there is no such repository."""
        found: list[str] = []
        for page in self._pages(f"/v2/{repository}/tags/list", repository, f"list the tags of {repository}"):
            found += [str(tag) for tag in page.get("tags") or ()]
        return tuple(sorted(set(found)))

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """What has `digest` as its subject, of one artifact type or of all; the registry's order.

        From the registry's own list (OCI 1.1), else from the tag `sha256-<hex>` of older registries.
        """
        pages = list(self._pages(f"/v2/{repository}/referrers/{digest}", repository, f"list what refers to {digest}"))
        known = [p for p in pages if p.get("mediaType", media.INDEX) == media.INDEX and "manifests" in p]
        if known:
            found = [Descriptor.from_json(entry) for page in known for entry in page["manifests"] or ()]
        else:
            found = list(read_list(self, repository, digest))
        whole = [self._described(repository, one) for one in found]
        return tuple(one for one in whole if artifact_type is None or one.artifact_type == artifact_type)

    def _described(self, repository: str, listed: Descriptor) -> Descriptor:
        """A referrer with its artifact type, which some lists do not know (seen: go-containerregistry 0.20)."""
        if listed.artifact_type not in ("", media.EMPTY):
            return listed
        found = self.manifest(repository, listed.digest)
        return found.descriptor() if found is not None else listed

    def _manifest_request(
        self, method: str, repository: str, reference: str
    ) -> contextlib.AbstractContextManager[requests.Response]:
        return self._http.request(
            method,
            f"/v2/{repository}/manifests/{reference}",
            scope=scope_of(repository),
            what=f"read {repository}{'@' if is_digest(reference) else ':'}{reference}",
            accept=(200, 404),
            headers={"Accept": ", ".join(media.MANIFESTS)},
        )

    def _pages(self, path: str, repository: str, what: str) -> Iterator[dict[str, Any]]:
        """The JSON objects of a list that a registry may give in pages; nothing where it has no such list."""
        seen: set[str] = set()
        while path and path not in seen and len(seen) < _PAGES:
            seen.add(path)

            def once(path: str = path) -> tuple[dict[str, Any], str]:
                with self._http.request(
                    "GET", path, scope=scope_of(repository), what=what, accept=(200, 404)
                ) as response:
                    if response.status_code == 404:
                        return {}, ""
                    body = read(response, _MANIFEST_LIMIT, self.patience.whole)
                    following = response.links.get("next", {}).get("url", "")
                    return Manifest(body, "", what).json(), joined(response, following) if following else ""

            page, path = self.patience.insist(once)
            if page:
                yield page
