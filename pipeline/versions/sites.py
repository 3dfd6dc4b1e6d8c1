"""One place that a version reaches, and when two spellings of a version are the same version."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Site(NamedTuple):
    """A place where a managed name, or a version that it governs, stands.

    `kind` is one of source, template, ARG, reference, pin, bake, image, git, url, value. `text` is what stands
    there; `wrong` is empty where it agrees with versions.json, else the finding.
    """

    path: str
    line: int
    name: str
    kind: str
    text: str
    wrong: str = ""


@lru_cache(maxsize=4096)
def public(text: str) -> str | None:
    """A version (PEP 440) in its one normal spelling, without a local label; None where it is none."""
    from packaging.version import InvalidVersion, Version

    try:
        return str(_trimmed(Version(text)))
    except InvalidVersion:
        return None


def _trimmed(version: object) -> str:
    """`2.13` and `2.13.0` are one version; the release without zeros at its end is its normal spelling."""
    from packaging.version import Version

    assert isinstance(version, Version)
    release = list(version.release)
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    tail = version.public.removeprefix(f"{version.epoch}!" if version.epoch else "")
    tail = tail[len(".".join(map(str, version.release))) :]
    return f"{version.epoch}!{'.'.join(map(str, release))}{tail}"


def local_label(text: str) -> str:
    """The local label of a version, `cu130` of `2.13.0+cu130`, or nothing."""
    return text.partition("+")[2].lower()


def same_version(found: str, wanted: str) -> bool:
    """Whether two texts are one version; a local label counts only where `wanted` has one."""
    if found == wanted:
        return True
    one, two = public(found), public(wanted)
    if one is None or two is None or one != two:
        return False
    return not local_label(wanted) or local_label(found) == local_label(wanted)
