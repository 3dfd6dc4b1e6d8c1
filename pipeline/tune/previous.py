"""Taking up an earlier cache: the leader reads and judges it, and all ranks load the same bytes or none.

What lies in the directory may come from anywhere: it is read by the strict reader of `pipeline.cache`, held against
its own manifest and against the record of this environment, and refused whole on the first doubt. A refusal is no
error, since tuning from nothing is always right; it is said, and written into the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cache.judge import judge
from pipeline.cache.store import check
from pipeline.cache.tree import Stored, walk
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import PipelineError
from pipeline.contract.manifest import Covered
from pipeline.contract.record import Record

TAKEN_UP = "taken up from an earlier cache"


@dataclass(frozen=True)
class Earlier:
    """The bytes that every rank loads (empty: none), their rows, and what is to be said about the choice."""

    data: bytes = b""
    sha256: str = ""
    covered: tuple[Covered, ...] = ()
    notes: tuple[str, ...] = ()


def find_earlier(root: Path | None, record: Record) -> Earlier:
    """The newest sound cache of this environment below `root`, a directory above `<version>/<arch>/<hash>/`."""
    if root is None:
        return Earlier()
    try:
        stored = walk(root).keys
    except PipelineError as error:
        return Earlier(notes=(f"no earlier cache was taken up: {error.message}",))
    notes = [] if stored else [f"no earlier cache was taken up: {root} holds none"]
    for one in sorted(stored, key=lambda s: s.manifest.ended if s.manifest else "", reverse=True):
        doubts = _doubts(one, record)
        if doubts:
            notes.append(f"the earlier cache {one.key} was not taken up: {doubts[0]}")
            continue
        assert one.manifest is not None
        data = one.cache_path.read_bytes()
        if sha256_bytes(data) != next(iter(one.manifest.files.values())).sha256:
            notes.append(f"the earlier cache {one.key} was not taken up: it changed while it was read")
            continue
        taken = f"took up {len(one.manifest.covered)} buckets from the earlier cache {one.key}"
        rows = tuple(replace(row, note=TAKEN_UP) for row in one.manifest.covered)
        return Earlier(data, sha256_bytes(data), rows, (*notes, taken))
    return Earlier(notes=tuple(notes))


def _doubts(stored: Stored, record: Record) -> Sequence[str]:
    if stored.manifest is None or stored.file is None:
        return [str(finding) for finding in stored.findings] or ["it is not complete"]
    if stored.manifest.record.key_inputs() != record.key_inputs():
        return [f"it was tuned elsewhere: {judge(stored.file, record.flashinfer).because or 'another processor'}"]
    judgement = judge(stored.file, record.flashinfer)
    return [str(f) for f in check(stored)] or ([judgement.because] if judgement.verdict != "ok" else [])
