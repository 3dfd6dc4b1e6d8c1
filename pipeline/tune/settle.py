"""After the tuning: compare, merge, save, look the result up again, and describe it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.contract.key import make_key
from pipeline.contract.manifest import Covered, Manifest, RankFacts
from pipeline.contract.opnames import is_skipped
from pipeline.contract.places import CACHE_FILE

from . import flashinfer_api
from .agreement import Held, RankResult, merge
from .coverage import CoverageMissing, cover
from .cpu_shim import SUBSTITUTIONS
from .save import file_facts
from .session import Session, holders, now

_STRATEGY = "synchronized"


def settle(session: Session) -> dict[str, tuple[int, ...]]:
    """Gather all ranks' entries, refuse what differs, and leave the union in the leader's tuner; return the owners."""

    ranks = session.ranks
    ranks.steps.say("comparing the ranks' entries")
    wanted = {key for keys in session.used.values() for key in keys}
    held = {key: entry for key, entry in flashinfer_api.entries(session.tuner).items() if key in wanted}
    results: list[RankResult] = ranks.gather(own_result(ranks.rank, held, session.used))
    union, owners = merge(results, holders(session.plan, ranks.world))
    session.facts = [{**fact, "entries": len(r.entries)} for fact, r in zip(session.facts, results, strict=True)]
    flashinfer_api.replace_entries(session.tuner, union)
    return owners


def own_result(rank: int, held: dict[str, Held], used: dict[int, list[str]]) -> RankResult:
    """What this rank hands in for comparison."""
    return RankResult(rank, held, used)


def check_saved(session: Session) -> tuple[Path, list[Covered]]:
    """Rank 0 saves as FlashInfer does; every rank loads that file afresh and finds each bucket's entry in it."""

    ranks, tuner = session.ranks, session.tuner
    saved = session.options.work / "saved" / CACHE_FILE
    ranks.steps.say("saving")
    if ranks.rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        tuner.save_configs(str(saved))
    ranks.barrier()
    ranks.steps.say("checking the coverage of the saved file")
    tuner.clear_cache()
    if not tuner.load_configs(str(saved)):
        raise CoverageMissing(
            f"rank {ranks.rank} cannot load the file that rank 0 saved: FlashInfer finds its record different here",
            hint="nothing was saved; the ranks must see one kind of device and the same libraries",
        )
    rows: dict[int, list[Covered]] = {}
    for index, case in session.cases.items():
        op = session.plan.ops[index]
        if not is_skipped(op.op, session.plan.skip_ops):
            rows[index] = cover(tuner, session.plan, op, case, session.measured)
    session.seconds = time.monotonic() - session.began
    said: list[tuple[float, dict[int, list[Covered]]]] = ranks.gather((session.seconds, rows))
    session.facts = [
        {**fact, "seconds": round(seconds, 3)} for fact, (seconds, _) in zip(session.facts, said, strict=True)
    ]
    first: dict[int, list[Covered]] = {}
    for _, theirs in said:
        for index, found in theirs.items():
            first.setdefault(index, found)
    return saved, [row for index in sorted(first) for row in first[index]]


def manifest_of(
    session: Session, saved: Path, owners: dict[str, tuple[int, ...]], covered: Sequence[Covered]
) -> Manifest:
    """Everything that is known about this cache."""

    plan, record, world = session.plan, session.record, session.ranks.world
    return Manifest(
        key=str(make_key(plan.digest, record)),
        plan=plan,
        record=record,
        strategy=_STRATEGY,
        strategy_reason=(
            f"FlashInfer {plan.flashinfer_version} has set_autotune_process_group: {world} ranks averaged the time of "
            "every tactic over a gloo group and chose alike"
        ),
        ranks=tuple(RankFacts(**fact) for fact in session.facts),
        owners=owners,
        covered=tuple(covered),
        files={CACHE_FILE: file_facts(saved)},
        started=session.started,
        ended=now(),
        options={
            "timeout": session.options.timeout,
            "nproc": world,
            "warmup": session.tuner.warmup,
            "repeat": session.tuner.repeat,
            "judge": "off",
        },
        substitutions=SUBSTITUTIONS if session.device.type == "cpu" else (),
        previous=session.earlier.sha256,
        notes=session.earlier.notes,
    )
