"""Verdicts: whether one is about an image, and whether several together prove all of it.

One rule for both sides: a release asks before it pushes, `attestation verify` asks of what is attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.errors import CacheRefused, PipelineError, PublishError, UsageError
from pipeline.contract.text import shown
from pipeline.contract.verdict import Verdict

from .images import untrusted

_MAX_BYTES = 4 << 20  # a verdict has some kilobytes


@dataclass(frozen=True)
class Subject:
    """What a verdict must be about: an image's identity, last layer's diff id, keys and their manifests."""

    identity: str
    cache_diff_id: str
    keys: tuple[str, ...]
    manifests: tuple[str, ...]


def mismatch(verdict: Verdict, subject: Subject) -> str:
    """Why a verdict does not count for an image; empty when it does."""
    if verdict.identity != subject.identity:
        return f"a verdict is of image {shown(verdict.identity, 26)}, this one is {subject.identity}"
    if verdict.cache_diff_id != subject.cache_diff_id:
        return f"a verdict is of the cache layer {shown(verdict.cache_diff_id, 80)}, the image's last is another"
    if not set(subject.manifests) <= set(verdict.manifest_sha256.split(",")):  # others came with the base image
        return "a verdict is of other manifests than the label names"
    if verdict.result != "pass":
        return f"a verdict says {verdict.result}: {shown(next(iter(verdict.findings), ''))}"
    return ""


def unproven(verdicts: Iterable[Verdict], keys: Sequence[str]) -> tuple[str, ...]:
    """The keys that none of these verdicts proves. Several hosts may each have replayed the keys of their own GPU."""
    proven = {key for one in verdicts for key in one.replayed_keys()}
    return tuple(key for key in keys if key not in proven)


def read(content: bytes, what: str) -> Verdict:
    """A verdict that anyone may have written; raise `InvalidResponse` or `CacheRefused`."""
    with untrusted(what):
        return Verdict.load(content)


def read_files(places: Iterable[Path]) -> tuple[Verdict, ...]:
    """The verdicts in files, and in the `*.json` of folders.

    Raises `UsageError` for a file that cannot be read, `CacheRefused` for one that is no verdict.
    """
    found: list[Verdict] = []
    for place in places:
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        found += [_read_file(path) for path in files]
    return tuple(found)


def _read_file(path: Path) -> Verdict:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CacheRefused(f"{path} is too large for a verdict")
        return read(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", hint="`pipeline verify IMAGE -o FILE` writes a verdict where the GPU is"
        ) from None
    except PipelineError as error:
        raise CacheRefused(f"{path}: {error.message}", hint="--verdict takes verdicts, and folders of them") from None


def sufficient(own: Verdict, given: Sequence[Verdict], absent: Iterable[Path] = ()) -> tuple[Verdict, ...]:
    """The verdicts that together prove every key of this very image, its own first.

    Raise `PublishError` naming the keys that nobody replayed, what keeps each of the others from counting, and the
    places (`absent`) that had none.
    """
    subject = Subject(own.identity, own.cache_diff_id, tuple(own.key.split(",")), tuple(own.manifest_sha256.split(",")))
    taken = [own] if own.replayed_keys() else []
    against = [f"{place} is not there" for place in absent]
    for one in given:
        why = mismatch(one, subject)
        if why:
            against += [why] if set(subject.keys) & set(one.key.split(",")) else []
        elif set(unproven(taken, subject.keys)) & set(one.replayed_keys()):
            taken.append(one)
    missing = unproven(taken, subject.keys)
    if missing:
        raise PublishError(
            f"no replay verdict for {', '.join(missing)} in {own.identity[:19]}… ({own.device})",
            details=against,
            hint="build the same image where that device is (CACHE= bakes the same bytes), `pipeline verify IMAGE "
            "-o FILE` there, and give that file with --verdict",
        )
    return tuple(taken)
