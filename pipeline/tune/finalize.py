"""After the tuning: merge all ranks' entries, save them, look the saved file up again, and describe it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.otherkeys import how_many_more, second_keys_note, with_other_keys
from pipeline.contract.digest import canonical_json, sha256_file
from pipeline.contract.files import write_json, write_whole
from pipeline.contract.manifest import Covered, FileFacts, Manifest, RankFacts
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.record import make_key
from pipeline.flashinfer.ops import is_skipped

from . import flashinfer_api, hooks
from .agreement import RankResult, merge
from .checkpoint import all_terms
from .coverage import CoverageMissing, cover
from .cpu_shim import SUBSTITUTIONS
from .failures import doubtful
from .session import Session, now
from .steps import result_path, saved_path, terms_path
from .strategies import INDEPENDENT, SYNCHRONIZED, holders


def gather_entries(session: Session) -> dict[str, tuple[int, ...]]:
    """Gather all ranks' entries, refuse what differs, and leave the union in this rank's tuner; return the owners."""
    ranks, name = session.ranks, session.strategy.name
    ranks.steps.say("checking that the ranks' entries agree")
    wanted = {key for keys in session.used.values() for key in keys}
    held = {key: entry for key, entry in flashinfer_api.entries(session.tuner).items() if key in wanted}
    results: list[RankResult] = ranks.gather(RankResult(ranks.rank, hooks.changed("entries", held), session.used))
    everyone = holders(session.plan, ranks.world) if name in (SYNCHRONIZED, INDEPENDENT) else None
    why = "nothing was saved; the ranks did not measure the same"
    if name == INDEPENDENT:
        why = "nothing was saved; ranks that tune alone rarely agree: use --strategy synchronized or sharded"
    union, owners = merge(results, everyone, why)
    session.facts = [
        {**fact, "entries": len(r.entries) + how_many_more(r.entries)}
        for fact, r in zip(session.facts, results, strict=True)
    ]
    note = second_keys_note(how_many_more(union))
    session.notes += [note] if note else []
    flashinfer_api.replace_entries(session.tuner, with_other_keys(union, owners))
    return owners


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
    rows = {
        index: cover(tuner, session.plan, session.plan.ops[index], case, session.measured)
        for index, case in session.cases.items()
        if not is_skipped(session.plan.ops[index].op, session.plan.skip_ops)
    }
    seconds = round(time.monotonic() - session.began, 3)
    notes = [*session.notes, session.second.lost, session.unkept, session.compare_budget.note()]
    said: list[tuple[float, dict[int, list[Covered]], list[dict[str, Any]], list[str]]] = ranks.gather(
        (seconds, rows, session.blocked, notes)
    )
    session.notes = list(dict.fromkeys(note for _, _, _, theirs in said for note in theirs if note))
    session.facts = [{**fact, "seconds": one[0]} for fact, one in zip(session.facts, said, strict=True)]
    blocked = {canonical_json(one): one for _, _, theirs, _ in said for one in theirs}  # each rank knows its own share
    session.blocked = list(blocked.values())
    return saved, _best_known([theirs for _, theirs, _, _ in said])


def _hand_over(session: Session, saved: Path) -> None:
    """Wait until the file is saved; give it to the other nodes, where the first rank of each writes it down."""
    ranks = session.ranks
    if int(os.environ["LOCAL_WORLD_SIZE"]) != ranks.world:
        data = ranks.broadcast(saved.read_bytes() if ranks.rank == 0 else None)
        if ranks.rank != 0 and int(os.environ["LOCAL_RANK"]) == 0:
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


def describe_result(
    session: Session, saved: Path, owners: dict[str, tuple[int, ...]], covered: Sequence[Covered]
) -> None:
    """Write beside the saved file its manifest, and for the supervisor what it tells and removes at the end."""
    plan, work, options = session.plan, session.options.work, session.options
    manifest = Manifest(
        key=str(make_key(plan.digest, session.record)),
        plan=plan,
        record=session.record,
        strategy=session.strategy.name,
        strategy_reason=session.strategy.reason,
        ranks=tuple(RankFacts(**fact) for fact in session.facts),
        owners=owners,
        covered=tuple(covered),
        files={CACHE_FILE: FileFacts(saved.stat().st_size, sha256_file(saved))},
        started=session.started,
        ended=now(),
        options={
            "timeout": options.timeout,
            "warmup": session.tuner.warmup,
            "repeat": session.tuner.repeat,
            "compare": options.compare,
            "compare_budget": options.compare_budget,
            "workers": int(options.second_process == "on"),
        },
        substitutions=SUBSTITUTIONS if session.device.type == "cpu" else (),
        previous=session.previous,
        blocked=tuple(session.blocked),
        modules=session.modules,
        notes=(*session.notes, *doubtful(covered)),
    )
    write_json(saved.with_name(MANIFEST_FILE), manifest.to_json())
    write_json(terms_path(work), all_terms(plan, session.deciding()))
    write_json(
        result_path(work, 0),
        {
            "key": manifest.key,
            "ranks": session.ranks.world,
            "strategy": manifest.strategy,
            "entries": sum(manifest.entries_per_op().values()),
            "covered": len(covered),
            "sha256": manifest.files[CACHE_FILE].sha256,
            "seconds": round(time.monotonic() - session.began, 3),
            "notes": list(manifest.notes),
            "substitutions": list(manifest.substitutions),
            "phases": {name: round(seconds, 3) for name, seconds in session.phases.items()},
        },
    )
