"""Whether the last layers hold the baked caches, one key each, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.cache.tree import Stored
from pipeline.contract.places import CACHE_ROOT

from .identity import Identity


def strangers(identity: Identity, keys: tuple[Stored, ...]) -> Iterator[str]:
    """Findings on the last layers: one per layer that is not exactly one key's directory."""
    if identity.sizes is not None:
        yield from _by_size(identity.sizes, keys)
        return
    places = {f"{CACHE_ROOT.lstrip('/')}/{stored.key}/" for stored in keys}
    for names in identity.names or ():
        if names is None:
            yield "one of the last layers is far larger than a cache: something was built on top of it"
            continue
        if not names:
            yield "one of the last layers is empty"
        homes = {place for place in places for name in names if name.startswith(place)}
        places -= homes
        for name in names:
            if not any(name.startswith(home) for home in homes):
                yield f"one of the last layers holds /{name}, which is no part of a cache"


def _by_size(sizes: tuple[int, ...], keys: tuple[Stored, ...]) -> Iterator[str]:
    weights = sorted(weight(stored.path) for stored in keys)
    if sorted(sizes) != weights:
        yield f"the last layers weigh {sorted(sizes)} bytes, the caches {weights}: they are not alone"


def weight(place: Path) -> int:
    """Bytes of the files below a directory."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
