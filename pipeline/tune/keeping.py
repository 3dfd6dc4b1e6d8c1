"""Writing what is finished while the rest is still being tuned: the files that `state` finds after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.files import write_json

from . import flashinfer_api
from .agreement import RankResult, merge
from .coverage import cover
from .session import Session, now
from .state import terms
from .strategy import INDEPENDENT


def keep(session: Session, index: int, buckets: Sequence[int], gather: Callable[[Any], list[Any]]) -> None:
    """Write the finished buckets of an op, once the ranks that measured it agree; the first of them writes.

    Raises `CoverageMissing` where the tuning left a hole and `TacticsDiffer` where ranks chose differently, which
    would otherwise be found at the end. Where the file cannot be written, a note says so. Independent ranks keep
    nothing: what they choose is worth nothing until all have chosen.
    """
    place = session.options.state
    if place is None or session.strategy.name == INDEPENDENT:
        return
    op, rank = session.plan.ops[index], session.ranks.rank
    part = replace(op, buckets=tuple(buckets))
    rows = cover(session.tuner, session.plan, part, session.cases[index], session.measured)
    held = flashinfer_api.entries(session.tuner)
    mine = {row.entry: held[row.entry] for row in rows}
    results: list[RankResult] = gather(RankResult(rank, mine, {index: sorted(mine)}))
    merge(results, None)
    if results[0].rank == rank:
        body = {
            "ended": now(),
            "entries": {key: asdict(one) for key, one in mine.items()},
            "covered": [asdict(row) for row in rows],
            "blocked": [b for b in session.blocked if b["op"] == op.name and b["bucket"] in buckets],
        }
        name = f"{terms(session.plan, op, session.deciding())}-{sha256_json(list(buckets))[:8]}.json"
        try:
            write_json(place / name, {"sha256": sha256_json(json.loads(json.dumps(body))), "body": body})
        except OSError as error:  # a full disk: what is lost is lost only to a run that takes up this one
            session.unkept = f"finished ops could not be kept in --state: {error.strerror}"
