"""FlashInfer caches to bake: each key becomes a layer of its own, wherever it was tuned."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import log
from pipeline.cache.difference import Side, difference
from pipeline.cache.otherkeys import how_many_more, told, with_other_keys
from pipeline.cache.read import read_cache
from pipeline.cache.store import check_root
from pipeline.cache.tree import Stored, sums
from pipeline.cache.union import merge_files
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import CacheRefused
from pipeline.contract.files import json_bytes, write_json
from pipeline.contract.key import Key
from pipeline.contract.manifest import FileFacts, Manifest
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

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
    """Copy a key to its place below a cache root, with the second keys that it may lack; return its manifest there.

    Caches from before entries were also written under second keys (`pipeline.cache.otherkeys`) get these now: servers
    that ask with the second key would find nothing else. The entries are those that the tuner itself writes there.
    """
    place = root / str(one.key)
    shutil.copytree(one.path, place)
    file, before = read_cache(place / CACHE_FILE), manifest_of(one)
    more = how_many_more(file.entries)
    if not more:
        return before
    owners = dict(before.owners)
    entries = with_other_keys(file.entries, owners)
    data = json_bytes(merge_files([(str(one.key), replace(file, entries=entries))]))
    ranks = [
        replace(rank, entries=sum(1 for key in entries if rank.rank in owners.get(key, (rank.rank,))))
        for rank in before.ranks
    ]
    note = f"{told(more)}: written when it was baked, since the cache is from before the tuner did so"
    log.note(f"{one.key}: {note}")
    after = replace(
        before,
        owners=owners,
        ranks=tuple(ranks),
        files={**before.files, CACHE_FILE: FileFacts(len(data), sha256_bytes(data))},
        notes=(*before.notes, note),
    )
    (place / CACHE_FILE).write_bytes(data)
    write_json(place / MANIFEST_FILE, after.to_json())
    return after


def _clash(one: Stored, two: Stored) -> list[str]:
    """The same key twice is fine when the contents are the same, else each differing entry is a finding."""
    if sums(one.path) == sums(two.path):
        return []
    if one.file is None or two.file is None:  # unreadable ones have findings of their own
        return []
    differs = difference(Side.of(str(one.path), one.file, one.manifest), Side.of(str(two.path), two.file, two.manifest))
    names = [name for name, sha in sums(one.path).items() if sums(two.path).get(name) != sha]
    return [
        f"{one.key} is in two roots with different contents ({', '.join(names)})",
        f"    a is {one.path}, b is {two.path}: {differs.line()}",
        *(f"    {row.line()}" for row in differs.differ[:_SHOWN]),
    ]
