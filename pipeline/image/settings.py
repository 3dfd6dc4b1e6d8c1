"""Refusing settings before any work starts."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.cache.store import check_root
from pipeline.contract.errors import CacheRefused, UsageError

# Docker's grammar: a first part counts as a registry only when it has a dot or a port, or is localhost.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:\d))(?::\d+)?"
_NAME = re.compile(rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?")


class ImageNameInvalid(UsageError):
    """IMAGE= cannot be an image's name."""


class PreviousMissing(UsageError):
    """PREVIOUS= is not a directory."""


class PreviousRefused(CacheRefused):
    """PREVIOUS= holds a cache that must not be loaded."""


def check_image_name(name: str) -> None:
    """Raise `ImageNameInvalid` unless `name` is empty or `[registry/]path[:tag]`."""
    if name and not _NAME.fullmatch(name):
        raise ImageNameInvalid(
            f"{name!r} cannot name an image", hint="such as registry.example/team/model:tag, lower case"
        )


def check_reference(name: str) -> None:
    """Raise `ImageNameInvalid` unless `name` can name an image that exists: a name, an id, or a name with a digest."""
    if not name.strip():
        raise ImageNameInvalid("no image was named", hint="`docker images tuned/*` lists those that are here")
    if re.fullmatch(r"(sha256:)?[0-9a-f]{6,64}", name):
        return
    check_image_name(re.sub(r"@sha256:[0-9a-f]{64}$", "", name))


def check_previous(previous: Path | None) -> Path | None:
    """Judge the cache root that ranks shall start from, with every finding; None stays None."""
    if previous is None:
        return None
    if not previous.is_dir():
        raise PreviousMissing(f"{previous} is not a directory", hint="give the root above <flashinfer-version>/")
    _, findings = check_root(previous)
    if findings:
        raise PreviousRefused(
            f"{previous} cannot be started from: {findings[0]}",
            details=[str(finding) for finding in findings[:20]],
            hint="leave PREVIOUS out to tune from nothing",
        )
    return previous
