"""Replay verdicts: this host's own, or the files of the hosts that have the GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.contract.errors import PipelineError
from pipeline.contract.text import shown
from pipeline.contract.verdict import Verdict

from .faults import NotReplayed, VerdictsUnreadable

_LARGEST = 4 << 20  # bytes; a verdict has some kilobytes


def read_verdicts(places: Iterable[Path]) -> tuple[Verdict, ...]:
    """The verdicts in files, and in the `*.json` of folders; raise `VerdictsUnreadable` on one that is none."""
    found: list[Verdict] = []
    for place in places:
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        found += [_read(path) for path in files]
    return tuple(found)


def _read(path: Path) -> Verdict:
    try:
        if path.stat().st_size > _LARGEST:
            raise VerdictsUnreadable(f"{path} is too large for a verdict")
        return Verdict.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise VerdictsUnreadable(
            f"{path}: {error.strerror}", hint="`pipeline verify IMAGE --output FILE` writes a verdict where the GPU is"
        ) from None
    except (ValueError, RecursionError):
        raise VerdictsUnreadable(f"{path} is not JSON", hint="--verdict takes verdicts, and folders of them") from None
    except PipelineError as error:
        raise VerdictsUnreadable(f"{path}: {error.message}", hint=error.hint) from None


def proofs(own: Verdict, given: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts that together replayed every key of this very image, its own first.

    Those given must name its config digest, cache layer and manifests. Raise `NotReplayed` naming the keys that nobody
    replayed, and what keeps each of the others from counting.
    """
    needed = set(own.key.split(","))
    taken = [own] if own.replayed_keys() else []
    seen = set(own.replayed_keys())
    against: list[str] = []
    for verdict in given:
        why = _stranger(own, verdict)
        if why:
            against += [why] if needed & set(verdict.key.split(",")) else []
        elif set(verdict.replayed_keys()) - seen:
            taken.append(verdict)
            seen |= set(verdict.replayed_keys())
    missing = sorted(needed - seen)
    if missing:
        raise NotReplayed(
            f"no replay verdict for {', '.join(missing)} in {own.config_digest[:19]}… ({own.device})",
            details=against,
            hint="build the same image where that device is (CACHE= bakes the same bytes), `pipeline verify IMAGE "
            "--output FILE` there, and give that file with --verdict",
        )
    return tuple(taken)


def _stranger(own: Verdict, other: Verdict) -> str:
    """Why a verdict does not count for this image; empty when it does."""
    names = {"config_digest": "image", "cache_diff_id": "cache layer", "manifest_sha256": "manifest", "key": "key"}
    for name, word in names.items():
        theirs, ours = getattr(other, name), getattr(own, name)
        if theirs != ours:
            return f"a verdict given is on {word} {shown(theirs[:26])}…, this one is {ours[:26]}…"
    return "" if other.result == "pass" else f"the verdict given failed: {shown(other.findings[0])}"
