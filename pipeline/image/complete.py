"""Caches from before answers were written under second keys (`pipeline.cache.otherkeys`) get them when they are baked.

Servers that ask with the second key would find nothing else, and the image's replay asks for it. The answer is the same
as the tuner itself writes there: nothing is chosen here. What lies on the host stays as it is; the baked file and its
manifest, which notes it, are made from it alone, so that the same cache gives the same layer each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline import log
from pipeline.cache.otherkeys import how_many_more, told, with_other_keys
from pipeline.cache.read import read_cache
from pipeline.cache.union import merge_files
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.files import json_bytes
from pipeline.contract.manifest import FileFacts
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

from .caches import Baked


def complete(keys: Sequence[Baked]) -> tuple[Baked, ...]:
    """Each key with its second keys; the very one where it has them, or where an engine made it, which asks itself."""
    return tuple(one if one.manifest.plan.engine is not None else _complete(one) for one in keys)


def _complete(one: Baked) -> Baked:
    file, before = read_cache(one.path / CACHE_FILE), one.manifest
    more = how_many_more(file.entries)
    if not more:
        return one
    owners = dict(before.owners)
    entries = with_other_keys(file.entries, owners)
    data = json_bytes(merge_files([(str(one.key), replace(file, entries=entries))]))
    ranks = [
        replace(rank, entries=sum(1 for key in entries if rank.rank in owners.get(key, (rank.rank,))))
        for rank in before.ranks
    ]
    note = f"{told(more)}: written when it was baked, since the cache is from before the tuner did so"
    log.note(f"{one.key}: {note}")
    manifest = replace(
        before,
        owners=owners,
        ranks=tuple(ranks),
        files={**before.files, CACHE_FILE: FileFacts(len(data), sha256_bytes(data))},
        notes=(*before.notes, note),
    )
    return replace(one, manifest=manifest, rewritten={CACHE_FILE: data, MANIFEST_FILE: json_bytes(manifest.to_json())})
