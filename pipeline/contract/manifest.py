"""manifest.json: what lies beside a cache file and says where it came from.

<root>/<flashinfer-version>/<arch>/<hash>/
    autotune_configs.json    FlashInfer's own file, as its AutoTuner saved it
    manifest.json            this
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from .decode import decode, load
from .errors import CacheRefused
from .places import MANIFEST_FILE
from .plan import Plan
from .record import Key, Record, make_key

SCHEMA = 1


class ManifestInvalid(CacheRefused):
    """manifest.json is not a manifest of this version."""


@dataclass(frozen=True)
class Covered:
    """One bucket of one op of the plan, and the entry that answers for it.

    `entry` is the key in FlashInfer's file, `runner` and `tactic` its value. Times are in milliseconds, the
    mean over all ranks, None where FlashInfer does not report them. `candidates` counts the tactics that were
    timed, `failed` those that no rank may use. A row that was compared has in `default_ms` the time of what FlashInfer
    runs untuned, in `ratio` the chosen time over it, in `spread` the half width of the ratio's confidence interval,
    both relative, and in `decided_by` the reason: `default`, `faster`, `tie`, or `argmin` where it was not compared.

    An op may look up several entries at one bucket (a MoE layer has one per product): a row for each.
    """

    op: str
    bucket: int
    entry: str
    runner: str
    tactic: Any
    candidates: int
    failed: int = 0
    time_ms: float | None = None
    default_ms: float | None = None
    note: str = ""
    ratio: float | None = None
    spread: float | None = None
    decided_by: str = "argmin"


@dataclass(frozen=True)
class RankFacts:
    """One rank of the run that tuned: host name, device as torch names it, GPU name and UUID, its entry count."""

    rank: int
    host: str
    device: str
    gpu: str
    uuid: str
    entries: int
    seconds: float


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and sha256 of one file beside the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Module:
    """One compiled JIT module that the plan loads; `path` is where it was loaded from when the ranks tuned."""

    name: str
    size: int
    sha256: str
    path: str = ""


@dataclass(frozen=True)
class Manifest:
    """The key's inputs in clear, how the ranks agreed, what is covered, and the sha256 of each file."""

    SCHEMA: ClassVar[int] = SCHEMA

    key: str
    plan: Plan
    record: Record
    strategy: str
    strategy_reason: str
    ranks: tuple[RankFacts, ...]
    owners: Mapping[str, tuple[int, ...]]  # only entries that not every rank has
    covered: tuple[Covered, ...]
    files: Mapping[str, FileFacts]
    started: str  # UTC, ISO 8601
    ended: str
    options: Mapping[str, Any] = field(default_factory=dict)  # every tuning option that was in force
    substitutions: tuple[str, ...] = ()  # what the CPU shim replaced; empty on GPUs
    blocked: tuple[Mapping[str, Any], ...] = ()  # tactics found wrong or crashing
    modules: tuple[Module, ...] = ()
    previous: str = ""  # sha256 of the cache file that the ranks started from
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)  # added by the host: base image, versions.json, …

    def entries_per_op(self) -> dict[str, int]:
        """How many distinct entries answer for each op of the plan."""
        found: dict[str, set[str]] = {}
        for row in self.covered:
            found.setdefault(row.op, set()).add(row.entry)
        return {op: len(entries) for op, entries in found.items()}

    def expected_key(self) -> Key:
        """The key that the inputs in clear give; equal to `key` in a sound manifest."""
        return make_key(self.plan.digest, self.record)

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        value = asdict(self)
        value["plan"] = self.plan.to_json()
        return {"schema": SCHEMA, **value}

    @staticmethod
    def from_json(value: object) -> Manifest:
        """Read a manifest; raise `ManifestInvalid` naming each field that is wrong."""
        return decode(Manifest, value, MANIFEST_FILE, ManifestInvalid, hint="tune again")

    @staticmethod
    def load(data: bytes) -> Manifest:
        """Read a manifest from bytes that anyone may have written; raise `ManifestInvalid`."""
        return load(Manifest, data, MANIFEST_FILE, ManifestInvalid, hint="tune again")

    def problems(self) -> Iterator[str]:
        """What is wrong though each field has the right type, for `decode`."""
        try:
            Key.parse(self.key)
        except CacheRefused as error:
            yield f".key: {error.message}"
