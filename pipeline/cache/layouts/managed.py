"""FlashInfer's managed store (0.7, `autotune_v2`): directory and files are named by digests of what they hold.

    v2/<16 digits over the manifest>/manifest.json                 the record and how it was measured, flat
    v2/<16 digits over the manifest>/entries/<24 digits>.json      {key, runner, tactic, …}

A lookup compares nothing: it asks for the directory of its own manifest, and finds none where a single field differs.
So there is neither a warning nor a wildcard, and a store that does not fit is simply never seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.cache.finding import BAD_ENTRY, Finding
from pipeline.cache.read import CacheFile, Entry
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.strictjson import FileMissing, Unreadable, parse_object, read_bytes
from pipeline.contract.text import shown

from .group import Group

MANIFEST = "manifest.json"
_NEVER_RECORD = ("cache_schema",)  # fields of the store's manifest that say nothing of the environment


def check(group: Group) -> list[str]:
    """Every reason why FlashInfer would not find what lies in a store."""
    return [str(finding) for finding in read(group).findings]


def read(group: Group) -> CacheFile:
    """A store as one file: its manifest as the record, each of its entries; what is wrong is among the findings."""
    metadata: dict[str, Any] | None = None
    entries: dict[str, Entry] = {}
    wrong: list[Finding] = []
    for one in group.files:
        name = one.path.name
        try:
            value, found = parse_object(read_bytes(one.path), name)
        except (FileMissing, Unreadable) as error:
            wrong.append(Finding("", error.message, error.hint, getattr(error, "because", "")))
            continue
        wrong += [Finding(name, defect.what, "", defect.because) for defect in found]
        if name == MANIFEST:
            metadata = value
            if sha256_bytes(_canonical(value))[:16] != one.path.parent.name:
                said = f"{group.directory} is not the digest of its manifest: FlashInfer never looks there"
                wrong.append(Finding("", said))
        elif said := _wrong_entry(value, name, one.path.stem):
            wrong.append(Finding("", said, "tune again", BAD_ENTRY))
        elif value["key"] in entries:
            wrong.append(Finding("", f"{name} is the second entry for {shown(value['key'], 80)}", "tune again"))
        else:
            policy = value.get("profiling_policy")
            policy = tuple(policy) if isinstance(policy, list) else None
            entries[value["key"]] = Entry(value["runner"], value["tactic"], policy)
    if not entries:
        wrong.append(Finding("", f"{group.directory} has no entries", "tune again: nothing was tuned"))
    return CacheFile(metadata, entries, {}, tuple(wrong))


def record_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a store's manifest that is FlashInfer's record."""
    return {name: value for name, value in metadata.items() if name not in _NEVER_RECORD}


def _wrong_entry(value: Mapping[str, Any], name: str, stem: str) -> str:
    key = value.get("key")
    if not isinstance(key, str) or not isinstance(value.get("runner"), str) or "tactic" not in value:
        return f"{name} is no entry of the store"
    if sha256_bytes(key.encode("utf-8", "replace"))[:24] != stem:
        return f"{name} is not named by its key {shown(key, 80)}: FlashInfer never finds it"
    return ""


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
