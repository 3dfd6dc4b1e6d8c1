"""What an interrupted run leaves: one file for each finished piece of work, written whole, taken up by the next run.

    DIR/<terms>-<buckets>.json     entries and manifest rows of some buckets of one op

`<terms>` is a digest of all that decides a choice: the op, the environment, the strategy, the options. A file whose
terms are not those of this run is left alone. The leader reads and judges, and every rank gets what it broadcasts; a
file that is damaged is refused and said. A run that ends well removes its files: they are no cache, and the next
tuning that is asked for must measure.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError
from pipeline.contract.manifest import Covered
from pipeline.contract.plan import OpPlan, Plan

from .agreement import Held

SCHEMA = 1
_LIMIT = 64 << 20  # bytes of a file
_FILES = 10_000
TAKEN_UP = "taken up from an interrupted run"


class StateUnusable(UsageError):
    """The directory of `--state` cannot be used."""


@dataclass(frozen=True)
class Kept:
    """What the leader found: entries by file key, their rows, tactics that were blocked, and what is to be said."""

    entries: Mapping[str, Held] = field(default_factory=dict)
    covered: tuple[Covered, ...] = ()
    blocked: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


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


def find_kept(place: Path | None, plan: Plan, deciding: Mapping[str, Any]) -> Kept:
    """Everything sound below `place` that belongs to this plan and environment; later files win over earlier ones."""
    if place is None:
        return Kept()
    names = {terms(plan, op, deciding): op.name for op in plan.ops}
    notes: list[str] = []
    bodies: list[tuple[str, dict[str, Any]]] = []
    for path in _files(place):
        try:
            if path.stem.partition("-")[0] in names:
                bodies.append((names[path.stem.partition("-")[0]], _read(path)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path.name} of an interrupted run was not taken up: {error}")
    entries: dict[str, Held] = {}
    rows: dict[tuple[str, int, str], Covered] = {}
    blocked: list[dict[str, Any]] = []
    for name, body in sorted(bodies, key=lambda found: str(found[1]["ended"])):
        for key, value in body["entries"].items():
            entries[key] = Held(**value)
        for row in (Covered(**value) for value in body["covered"]):
            rows[name, row.bucket, row.entry] = replace(row, op=name, note=TAKEN_UP)
        blocked += [{**one, "op": name} for one in body.get("blocked", ())]
    if rows:
        ops = list(dict.fromkeys(name for name, _, _ in sorted(rows)))
        count = len({(name, bucket) for name, bucket, _ in rows})
        notes.append(f"took up {count} buckets of {len(ops)} ops from an interrupted run: {', '.join(ops)}")
    return Kept(entries, tuple(rows.values()), tuple(blocked), tuple(notes))


def _files(place: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        found = sorted(place.glob("*.json"))[:_FILES]
        yield from (path for path in found if path.is_file() and not path.is_symlink())


def _read(path: Path) -> dict[str, Any]:
    """One file's body; raises `ValueError` or what indexing a wrong shape raises."""
    if path.stat().st_size > _LIMIT:
        raise ValueError("it is too large")
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


def all_terms(plan: Plan, deciding: Mapping[str, Any]) -> list[str]:
    """The terms of every op of a plan, sorted: what the names of its files begin with."""
    return sorted({terms(plan, op, deciding) for op in plan.ops})


def forget(place: Path | None, names: Collection[str]) -> None:
    """Remove what was kept under these terms, and what a rank was ended while it wrote."""
    if place is not None:
        for path in [*_files(place), *place.glob(".*.json.*")]:
            if path.name.lstrip(".").partition("-")[0] in names:
                path.unlink(missing_ok=True)
