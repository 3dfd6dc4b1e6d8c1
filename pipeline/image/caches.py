"""FlashInfer caches to bake: each key becomes a layer of its own, wherever it was tuned."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.cache.integrity import check_root
from pipeline.cache.tree import Stored, sums
from pipeline.contract.errors import CacheRefused
from pipeline.contract.manifest import Manifest
from pipeline.contract.record import Key

_SHOWN = 20


def collect(roots: Sequence[Path]) -> tuple[Stored, ...]:
    """Check every cache root and return its keys, sorted. Raise `CacheRefused` with every reason of every root,
    or `FileMissing`.
    """
    findings: list[str] = []
    found: dict[Key, Stored] = {}
    for root in roots:
        tree, wrong = check_root(root)
        findings += [f"{root}: {finding}" for finding in wrong]
        for stored in tree.keys:
            if stored.key in found:
                findings += _clash(found[stored.key], stored)
            else:
                found[stored.key] = stored
    if findings:
        raise CacheRefused(
            f"{len(findings)} validation error{'s' * (len(findings) > 1)}: {findings[0]}",
            details=findings[:_SHOWN],
            hint="nothing was baked; `pipeline cache diff A B` compares two, `pipeline tune` makes one again",
        )
    return tuple(stored for _, stored in sorted(found.items()))


def manifest_of(stored: Stored) -> Manifest:
    """The manifest of a key that was checked."""
    assert stored.manifest is not None, "`collect` lets no key without one pass"
    return stored.manifest


def check_flashinfer(keys: Sequence[Stored], installed: str, *, hint: str) -> None:
    """Refuse keys of another FlashInfer than is, or will be, in the image; raise `CacheRefused` with each."""
    wrong = [
        f"{one.path} was tuned with FlashInfer {one.key.flashinfer_version}, and the image has {installed}"
        for one in keys
        if one.key.flashinfer_version.partition("+")[0] != installed.partition("+")[0]
    ]
    if wrong:
        raise CacheRefused(wrong[0], details=wrong[1:_SHOWN], hint=hint)


def copy_below(one: Stored, root: Path) -> Manifest:
    """Copy a key to its place below a cache root; return its manifest."""
    shutil.copytree(one.path, root / str(one.key))
    return manifest_of(one)


def _clash(one: Stored, two: Stored) -> list[str]:
    """The same key twice is fine when the contents are the same, else the files that differ are a finding."""
    before, after = sums(one.path), sums(two.path)
    if before == after:
        return []
    names = ", ".join(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
    return [f"{one.key} is in {one.path} and in {two.path} with different contents ({names})"]
