"""Names of what lies in a registry: `registry/repository[:tag][@digest]`, as Docker reads them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from pipeline.contract.errors import UsageError
from pipeline.contract.text import shown

DOCKER_HUB = "docker.io"
_HUB_NAMES = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})

# The grammar of the OCI distribution specification, with Docker's rule for which first part is a host.
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_LENGTH = 255  # of host and repository together
_HINT = "such as registry.example.com/team/model:tag, or …/model@sha256:<64 hexadecimal digits>"


def is_digest(text: str) -> bool:
    """Whether a text is a sha256 digest, the only kind that is used here."""
    return _DIGEST.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Whether a text can be a tag."""
    return _TAG.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Whether a host (`name[:port]`) is this machine: `localhost`, 127.0.0.0/8 or ::1."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) and not host.endswith("]") else host
    name = name.strip("[]")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def api_host(registry: str) -> str:
    """The host that answers for a registry's name. Docker Hub's is not the one in its images' names."""
    return "registry-1.docker.io" if registry in _HUB_NAMES else registry


@dataclass(frozen=True)
class Reference:
    """A name in its parts. `registry` is empty where none is named, `tag` and `digest` where not given."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @staticmethod
    def parse(text: str) -> Reference:
        """Read a name; nothing is filled in. Raises `UsageError`."""
        rest, at, digest = text.partition("@")
        if "://" in text or (at and "/" in digest):  # the text may have a password: it is not repeated
            raise UsageError("a registry's name has neither `http://` nor a login", hint=f"`docker login`; {_HINT}")
        if at and not is_digest(digest):
            raise UsageError(f"{shown(text)}: {shown(digest)} is not a sha256 digest", hint=_HINT)
        first, slash, path = rest.partition("/")
        named = bool(slash) and ("." in first or ":" in first or first == "localhost")
        registry, path = (first, path) if named else ("", rest)
        repository, colon, tag = path.partition(":")
        if registry and not _HOST.fullmatch(registry):
            raise UsageError(f"{shown(text)}: {shown(registry)} is not a registry's host", hint=_HINT)
        if not _REPOSITORY.fullmatch(repository) or len(registry) + len(repository) > _MAX_LENGTH:
            raise UsageError(f"{shown(text)}: {shown(repository)} is not a repository's name", hint=_HINT)
        if colon and not is_tag(tag):
            raise UsageError(f"{shown(text)}: {shown(tag)} is not a tag", hint=_HINT)
        return Reference(registry, repository, tag, digest)

    @staticmethod
    def in_registry(text: str) -> Reference:
        """Read a name that must name its registry; raise `UsageError`.

        Docker Hub has one name here, `docker.io`, and its official images lie below `library/`.
        """
        found = Reference.parse(text)
        if not found.registry:
            raise UsageError(f"{shown(text)} names no registry", hint=_HINT)
        if found.registry in _HUB_NAMES:
            repository = found.repository if "/" in found.repository else f"library/{found.repository}"
            return replace(found, registry=DOCKER_HUB, repository=repository)
        return found

    @property
    def name(self) -> str:
        """`registry/repository`, without tag and digest."""
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    @property
    def target(self) -> str:
        """What a registry is asked for: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> Reference:
        """The same repository by digest alone; raise `UsageError`."""
        if not is_digest(digest):
            raise UsageError(f"{shown(digest)} is not a sha256 digest", hint=_HINT)
        return replace(self, tag="", digest=digest)

    def tagged(self, tag: str) -> Reference:
        """The same repository by tag alone; raise `UsageError`."""
        if not is_tag(tag):
            raise UsageError(f"{shown(tag)} is not a tag", hint=_HINT)
        return replace(self, tag=tag, digest="")

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")
