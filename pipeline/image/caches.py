"""Caches to bake: each key becomes a layer of its own, wherever it was tuned."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.cache.difference import Side, difference
from pipeline.cache.store import check_root
from pipeline.cache.tree import Stored, sums
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import CacheRefused, UsageError
from pipeline.contract.files import write_whole
from pipeline.contract.key import Key
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import MANIFEST_FILE

_SHOWN = 20


class CachesRefused(CacheRefused):
    """CACHE= holds something that must not be baked; nothing was baked."""


class OtherFlashInfer(CacheRefused):
    """A cache for another FlashInfer than the image's: it would be ignored."""


class CacheMissing(UsageError):
    """CACHE= names a directory that is not there."""


@dataclass(frozen=True)
class Baked:
    """One key to bake: where its directory lies on the host, and its manifest.

    `rewritten` holds files, by name, that are baked with other bytes than lie there (`complete`).
    """

    key: Key
    path: Path
    manifest: Manifest
    rewritten: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def manifest_bytes(self) -> bytes:
        """manifest.json as it is baked."""
        known = self.rewritten.get(MANIFEST_FILE)
        return (self.path / MANIFEST_FILE).read_bytes() if known is None else known

    @property
    def manifest_sha256(self) -> str:
        """sha256 of manifest.json as it is baked."""
        return sha256_bytes(self.manifest_bytes)

    def copy_below(self, root: Path) -> None:
        """Copy the key's directory to its place below a cache root."""
        shutil.copytree(self.path, root / str(self.key))
        for name, data in self.rewritten.items():
            write_whole(root / str(self.key) / name, data)


def collect(roots: Sequence[Path]) -> tuple[Baked, ...]:
    """Judge every cache root and return its keys, sorted. Raise `CachesRefused` with every reason of every root."""
    findings: list[str] = []
    found: dict[Key, Stored] = {}
    for root in roots:
        if not root.is_dir():
            raise CacheMissing(f"{root} is not a directory", hint="CACHE takes roots above <flashinfer-version>/")
        tree, wrong = check_root(root)
        findings += [f"{root}: {finding}" for finding in wrong]
        for stored in tree.keys:
            if stored.key in found:
                findings += _clash(found[stored.key], stored)
            else:
                found[stored.key] = stored
    if findings:
        raise CachesRefused(
            f"{len(findings)} reasons against these caches: {findings[0]}",
            details=findings[:_SHOWN],
            hint="nothing was baked; `pipeline cache diff A B` compares two, `pipeline tune` makes one again",
        )
    pairs = sorted(found.items())
    return tuple(Baked(key, stored.path, stored.manifest) for key, stored in pairs if stored.manifest is not None)


def check_flashinfer(keys: Sequence[Baked], installed: str, *, hint: str) -> None:
    """Refuse keys of another FlashInfer than is, or will be, in the image; raise `OtherFlashInfer` with each."""
    wrong = [
        f"{one.path} was tuned with FlashInfer {one.key.flashinfer_version}, and the image has {installed}"
        for one in keys
        if one.key.flashinfer_version.partition("+")[0] != installed.partition("+")[0]
    ]
    if wrong:
        raise OtherFlashInfer(wrong[0], details=wrong[1:_SHOWN], hint=hint)


def _clash(one: Stored, two: Stored) -> list[str]:
    """The same key twice is fine when the contents are the same, else each differing entry is a finding."""
    if sums(one.path) == sums(two.path):
        return []
    if one.file is None or two.file is None:  # unreadable ones have findings of their own
        return []
    told = difference(Side.of(str(one.path), one.file, one.manifest), Side.of(str(two.path), two.file, two.manifest))
    names = [name for name, sha in sums(one.path).items() if sums(two.path).get(name) != sha]
    return [
        f"{one.key} is in two roots with different contents ({', '.join(names)})",
        f"    a is {one.path}, b is {two.path}: {told.line()}",
        *(f"    {row.line()}" for row in told.differ[:_SHOWN]),
    ]
