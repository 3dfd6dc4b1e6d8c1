"""Writing one answer under the keys of all who ask for it (`pipeline.cache.otherkeys` says who does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.cache.otherkeys import other_keys

from .agreement import Held


def with_other_keys(entries: Mapping[str, Held], owners: dict[str, tuple[int, ...]]) -> dict[str, Held]:
    """`entries` and, beside each, the same answer under its other keys; `owners` learns who holds those."""
    found = dict(entries)
    for key, held in entries.items():
        for other in other_keys(key):
            found.setdefault(other, held)
            if key in owners:
                owners[other] = owners[key]
    return found


def how_many_more(keys: Iterable[str]) -> int:
    """How many entries `with_other_keys` adds to those of one rank."""
    keys = set(keys)
    return len({other for key in keys for other in other_keys(key)} - keys)
