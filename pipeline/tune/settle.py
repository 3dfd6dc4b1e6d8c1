"""After the tuning: compare, merge, save, look the result up again, and describe it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.otherkeys import how_many_more, told, with_other_keys
from pipeline.contract.digest import canonical_json
from pipeline.contract.files import write_whole
from pipeline.contract.key import make_key
from pipeline.contract.manifest import Covered, Manifest, RankFacts
from pipeline.contract.places import CACHE_FILE
from pipeline.flashinfer.ops import is_skipped

from . import flashinfer_api
from .agreement import Held, RankResult, merge
from .coverage import CoverageMissing, cover
from .cpu_shim import SUBSTITUTIONS
from .doubts import doubtful
from .rank import saved_path
from .save import file_facts
from .session import Session, holders, now
from .strategy import INDEPENDENT, SYNCHRONIZED

_HINTS = {
    INDEPENDENT: "nothing was saved; ranks that tune alone rarely agree: use --strategy synchronized or sharded",
}


def settle(session: Session) -> dict[str, tuple[int, ...]]:
    """Gather all ranks' entries, refuse what differs, and leave the union in the leader's tuner; return the owners."""

    ranks = session.ranks
    ranks.steps.say("comparing the ranks' entries")
    wanted = {key for keys in session.used.values() for key in keys}
    held = {key: entry for key, entry in flashinfer_api.entries(session.tuner).items() if key in wanted}
    results: list[RankResult] = ranks.gather(own_result(ranks.rank, held, session.used))
    name = session.strategy.name
    everyone = holders(session.plan, ranks.world) if name in (SYNCHRONIZED, INDEPENDENT) else None
    union, owners = merge(results, everyone, _HINTS.get(name, "nothing was saved; the ranks did not tune in step"))
    session.facts = [
        {**fact, "entries": len(r.entries) + how_many_more(r.entries)}
        for fact, r in zip(session.facts, results, strict=True)
    ]
    note = told(how_many_more(union))
    session.notes += [note] if note else []
    flashinfer_api.replace_entries(session.tuner, with_other_keys(union, owners))
    return owners


def own_result(rank: int, held: dict[str, Held], used: dict[int, list[str]]) -> RankResult:
    """What this rank hands in for comparison."""
    return RankResult(rank, held, used)


def check_saved(session: Session) -> tuple[Path, list[Covered]]:
    """Rank 0 saves as FlashInfer does; every rank loads that file afresh and finds each bucket's entry in it."""

    ranks, tuner = session.ranks, session.tuner
    saved = saved_path(session.options.work)
    ranks.steps.say("saving")
    if ranks.rank == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        tuner.save_configs(str(saved))
    _hand_over(session, saved)
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
    said: list[tuple[float, dict[int, list[Covered]], list[dict[str, Any]], list[str]]] = ranks.gather(
        (
            session.seconds,
            rows,
            session.blocked,
            [*session.notes, session.second.lost, session.unkept, session.compare_budget.note()],
        )
    )
    session.notes = list(dict.fromkeys(note for _, _, _, notes in said for note in notes if note))
    session.facts = [
        {**fact, "seconds": round(seconds, 3)} for fact, (seconds, _, _, _) in zip(session.facts, said, strict=True)
    ]
    blocked = {canonical_json(one): one for _, _, theirs, _ in said for one in theirs}  # each rank knows its own share
    session.blocked = list(blocked.values())
    return saved, _best_known([theirs for _, theirs, _, _ in said])


def _hand_over(session: Session, saved: Path) -> None:
    """Wait until the file is saved; give it to the other nodes, where the first rank of each writes it down."""
    ranks = session.ranks
    if int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world) == ranks.world:
        ranks.barrier()
        return
    data = ranks.broadcast(saved.read_bytes() if ranks.rank == 0 else None)
    if ranks.rank != 0 and int(os.environ.get("LOCAL_RANK") or 0) == 0:
        write_whole(saved, data)
    ranks.barrier()


def _best_known(said: Sequence[dict[int, list[Covered]]]) -> list[Covered]:
    """One row for each op, bucket and entry: of the rank that measured it, where not all did."""
    best: dict[tuple[int, int, str], Covered] = {}
    for theirs in said:
        for index, rows in theirs.items():
            for row in rows:
                known = best.setdefault((index, row.bucket, row.entry), row)
                if row.candidates > known.candidates:
                    best[index, row.bucket, row.entry] = row
    return [best[place] for place in sorted(best, key=lambda place: place[:2])]


def manifest_of(
    session: Session, saved: Path, owners: dict[str, tuple[int, ...]], covered: Sequence[Covered]
) -> Manifest:
    """Everything that is known about this cache."""

    plan, record, world = session.plan, session.record, session.ranks.world
    return Manifest(
        key=str(make_key(plan.digest, record)),
        plan=plan,
        record=record,
        strategy=session.strategy.name,
        strategy_reason=session.strategy.reason,
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
            "compare": session.options.compare,
            "compare_budget": session.options.compare_budget,
            "workers": session.options.workers,
            "share_gpu": session.options.share_gpu,
        },
        substitutions=SUBSTITUTIONS if session.device.type == "cpu" else (),
        previous=session.earlier.sha256,
        blocked=tuple(session.blocked),
        modules=session.modules,
        notes=(*session.earlier.notes, *session.notes, *doubtful(covered)),
    )
