"""Ours: `<root>/<flashinfer-version>/<arch>/<hash>/autotune_configs.json`, one file for all ranks, never rewritten."""

from __future__ import annotations

from pathlib import Path

from pipeline.cache.store import check as check_key
from pipeline.cache.tree import find_keys, read_key
from pipeline.contract.key import Key
from pipeline.contract.places import CACHE_FILE, ENV_CACHE_DIR

from .group import Group, Offer, RankFile

NAME = "plain"


def gather(root: str) -> tuple[Group, ...]:
    """One group for each key below a cache root."""
    place = Path(root)
    return tuple(
        Group(NAME, place, str(key), (RankFile(place / str(key) / CACHE_FILE),), {"key": str(key)})
        for key in find_keys(place)
    )


def check(group: Group) -> tuple[str, ...]:
    """What the key's own manifest does not confirm."""
    return tuple(str(finding) for finding in check_key(read_key(group.root, Key.parse(group.directory))))


def offer(group: Group) -> Offer:
    """The root itself: nothing is copied, since nothing is written."""
    return Offer(ENV_CACHE_DIR, group.directory, "nothing")
