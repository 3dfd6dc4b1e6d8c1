"""What a tuning begins with: finished pieces of an interrupted run (`--state`), an earlier cache (`--previous`).

    DIR/<terms>-<buckets>.json     entries and manifest rows of some buckets of one op, written whole when they are done

`<terms>` is a digest of all that decides a choice: the op, the environment, the strategy, the options. A file whose
terms are not those of this run is left alone. A run that ends well removes its files: they are no cache, and the next
tuning that is asked for must measure.

An earlier cache may come from anywhere: it is read by the strict reader of `pipeline.cache`, compared with its own
manifest and with the record of this environment, and refused whole on the first doubt. No refusal is an error, since
tuning from nothing is always right; it is said, and written into the manifest. The leader reads and judges, and every
rank gets what it broadcasts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.cache.integrity import check
from pipeline.cache.judge import judge
from pipeline.cache.tree import Stored, walk
from pipeline.contract.digest import sha256_bytes, sha256_json
from pipeline.contract.errors import PipelineError, UsageError
from pipeline.contract.files import write_json
from pipeline.contract.manifest import Covered
from pipeline.contract.plan import OpPlan, Plan
from pipeline.contract.record import Record

from .agreement import Held

SCHEMA = 1
RESUMED = "resumed from an interrupted run"
EARLIER = "from an earlier cache"


class StateUnusable(UsageError):
    """The directory of `--state` cannot be used."""


@dataclass(frozen=True)
class Known:
    """What was found: entries by file key, their rows, tactics that were blocked, and what is to be said about it.

    Of an earlier cache the entries are the bytes of its file (`cache`), which every rank loads.
    """

    entries: Mapping[str, Held] = field(default_factory=dict)
    covered: tuple[Covered, ...] = ()
    blocked: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    cache: bytes = b""
    sha256: str = ""


def open_state(place: Path) -> Path:
    """Make the directory and see that it can be written to, before anything is tuned; raise `StateUnusable`."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise StateUnusable(f"--state {place}: {error.strerror}", hint="name a writable directory") from error
    return place.resolve()


def terms(plan: Plan, op: OpPlan, deciding: Mapping[str, Any]) -> str:
    """The digest of what decides how an op is tuned. Buckets and ranks stay out: they say how much, not how."""
    meaning = {name: value for name, value in op.meaning().items() if name not in ("buckets", "ranks")}
    return sha256_json([SCHEMA, meaning, plan.round_up, plan.seed, dict(deciding)])[:32]


def all_terms(plan: Plan, deciding: Mapping[str, Any]) -> list[str]:
    """The terms of every op of a plan, sorted: what the names of its files begin with."""
    return sorted({terms(plan, op, deciding) for op in plan.ops})


def write_finished(
    place: Path,
    of: str,
    rows: Sequence[Covered],
    entries: Mapping[str, Held],
    *,
    blocked: Sequence[Mapping[str, Any]],
    ended: str,
) -> None:
    """Write the finished buckets of an op whose terms are `of`. Raises `OSError`."""
    body = {
        "ended": ended,
        "entries": {key: asdict(one) for key, one in entries.items()},
        "covered": [asdict(row) for row in rows],
        "blocked": list(blocked),
    }
    name = f"{of}-{sha256_json([row.bucket for row in rows])[:8]}.json"
    write_json(place / name, {"sha256": sha256_json(json.loads(json.dumps(body))), "body": body})


def find_finished(place: Path | None, plan: Plan, deciding: Mapping[str, Any]) -> Known:
    """Everything sound below `place` that belongs to this plan and environment; later files win over earlier ones."""
    if place is None:
        return Known()
    names = {terms(plan, op, deciding): op.name for op in plan.ops}
    notes: list[str] = []
    bodies: list[tuple[str, dict[str, Any]]] = []
    for path in _files(place):
        try:
            if path.stem.partition("-")[0] in names:
                bodies.append((names[path.stem.partition("-")[0]], _read(path)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path.name} of an interrupted run was not used: {error}")
    entries: dict[str, Held] = {}
    rows: dict[tuple[str, int, str], Covered] = {}
    blocked: list[dict[str, Any]] = []
    for name, body in sorted(bodies, key=lambda found: str(found[1]["ended"])):
        for key, value in body["entries"].items():
            entries[key] = Held(**value)
        for row in (Covered(**value) for value in body["covered"]):
            rows[name, row.bucket, row.entry] = replace(row, op=name, note=RESUMED)
        blocked += [{**one, "op": name} for one in body.get("blocked", ())]
    if rows:
        ops = list(dict.fromkeys(name for name, _, _ in sorted(rows)))
        count = len({(name, bucket) for name, bucket, _ in rows})
        notes.append(f"resumed {count} buckets of {len(ops)} ops from an interrupted run: {', '.join(ops)}")
    return Known(entries, tuple(rows.values()), tuple(blocked), tuple(notes))


def _files(place: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(place.glob("*.json")) if path.is_file() and not path.is_symlink())


def _read(path: Path) -> dict[str, Any]:
    """One file's body; raises `ValueError` or what indexing a wrong shape raises."""
    value = json.loads(path.read_bytes())
    body: dict[str, Any] = value["body"]
    if value["sha256"] != sha256_json(body):
        raise ValueError("it does not have its own sha256")
    entries = {str(key): Held(**held) for key, held in body["entries"].items()}
    for row in (Covered(**one) for one in body["covered"]):
        held = entries[row.entry]
        if (held.runner, held.tactic) != (row.runner, row.tactic) or row.candidates < 1:
            raise ValueError(f"its row for {row.bucket} tokens is not what its entry says")
    return {**body, "ended": str(body["ended"])}


def forget(place: Path | None, names: Collection[str]) -> None:
    """Remove what was kept under these terms, and what a rank was ended while it wrote."""
    if place is not None:
        for path in [*_files(place), *place.glob(".*.json.*")]:
            if path.name.lstrip(".").partition("-")[0] in names:
                path.unlink(missing_ok=True)


def find_earlier(root: Path | None, record: Record) -> Known:
    """The newest sound cache of this environment below `root`, a directory above `<version>/<arch>/<hash>/`."""
    if root is None:
        return Known()
    try:
        stored = walk(root).keys
    except PipelineError as error:
        return Known(notes=(f"no earlier cache was used: {error.message}",))
    notes = [] if stored else [f"no earlier cache was used: there is none in {root}"]
    for one in sorted(stored, key=lambda s: s.manifest.ended if s.manifest else "", reverse=True):
        doubts = _doubts(one, record)
        if doubts:
            notes.append(f"the earlier cache {one.key} was not used: {doubts[0]}")
            continue
        assert one.manifest is not None
        data = one.cache_path.read_bytes()
        if sha256_bytes(data) != next(iter(one.manifest.files.values())).sha256:
            notes.append(f"the earlier cache {one.key} was not used: it changed while it was read")
            continue
        rows = tuple(replace(row, note=EARLIER) for row in one.manifest.covered)
        notes.append(f"began with {len(rows)} buckets of the earlier cache {one.key}")
        return Known({}, rows, (), tuple(notes), data, sha256_bytes(data))
    return Known(notes=tuple(notes))


def _doubts(stored: Stored, record: Record) -> Sequence[str]:
    if stored.manifest is None or stored.file is None:
        return [str(finding) for finding in stored.findings] or ["it is not complete"]
    if stored.manifest.record.key_inputs() != record.key_inputs():
        return [f"it was tuned elsewhere: {judge(stored.file, record.flashinfer).because or 'another processor'}"]
    judgement = judge(stored.file, record.flashinfer)
    return [str(f) for f in check(stored)] or ([judgement.because] if judgement.verdict != "ok" else [])
