"""Tuning the ops of a plan: FlashInfer tunes → compare with the default → check → write the finished buckets.

With the strategy `synchronized` all ranks that have an op measure it together; else each measures its share alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.ops import is_skipped

from . import checkpoint, flashinfer_api, hooks
from .agreement import RankResult, merge
from .compare.compare import compare_op
from .compare.decide import Budget
from .coverage import call, cover, settings
from .cpu_shim import cpu_clock
from .guard import stops_rank
from .ops import spec_of
from .ops.reference import seed_for
from .session import Session, now
from .soundness import check_choices
from .strategies import INDEPENDENT, holders, share

Gather = Callable[[Any], list[Any]]


def tune(session: Session) -> None:
    """Tune every op of the plan that this rank has, in the plan's order, the way the session's strategy says."""
    clock = cpu_clock() if session.device.type == "cpu" else contextlib.nullcontext()
    with clock, stops_rank(), session.ranks.watched_reductions():
        if session.strategy.together:
            _together(session)
        else:
            _apart(session)


def _together(session: Session) -> None:
    """Every rank that has an op measures it, and FlashInfer averages each time over them."""
    autotuner, mine = flashinfer_api.load(), _groups(session)
    session.compare_budget = _budget(session, sum(len(session.plan.ops[index].buckets) for index in mine))
    for index, group in mine.items():
        buckets = _prepare(session, index, group)
        if not buckets:
            continue

        def gather(value: Any, group: Any = group) -> list[Any]:  # noqa: ANN401
            return session.ranks.gather(value, group)

        try:
            autotuner.set_autotune_process_group(group)
            _tune_op(session, index, buckets, gather)
        finally:
            autotuner.set_autotune_process_group(None)


def _apart(session: Session) -> None:
    """The ranks agree on everything first; from then on none waits for another until all have measured their share."""
    todo = {index: _prepare(session, index, group) for index, group in _groups(session).items()}
    mine = share(session.strategy.name, session.plan, session.ranks.gather(todo), session.ranks.rank)
    session.compare_budget = _budget(session, sum(map(len, mine.values())))
    for index, buckets in mine.items():
        _tune_op(session, index, buckets, lambda value: [value])


def _budget(session: Session, buckets: int) -> Budget:
    """The limit of all comparing."""
    return Budget((session.options.compare_budget or 0.0) * buckets)


def _groups(session: Session) -> dict[int, Any]:
    """The ops that this rank has, and for each the group of all ranks that have it."""
    everyone = holders(session.plan, session.ranks.world)
    return {i: session.ranks.group(ranks) for i, ranks in enumerate(everyone) if session.ranks.rank in ranks}


def _prepare(session: Session, index: int, group: Any) -> tuple[int, ...]:  # noqa: ANN401 - a ProcessGroup
    """Make an op's inputs, agree with the other ranks that have it, and return the buckets to tune, ascending."""
    plan, steps, op = session.plan, session.ranks.steps, session.plan.ops[index]
    steps.say(f"preparing {op.name} ({op.op})", op=index + 1)
    case = session.cases[index] = spec_of(op).make(op, session.device, plan.seed)
    held = flashinfer_api.entries(session.tuner)
    elsewhere = _known_to_some(session, index)
    todo = () if is_skipped(op.op, plan.skip_ops) else _unanswered(session, index)
    session.ranks.contract(
        {
            "plan digest": plan.digest,
            "op": op.meaning(),
            "buckets": list(op.buckets),
            "skip_ops": sorted(plan.skip_ops),
            "rank to GPU": session.devices(),
            "cache entries at entry": {
                key: sha256_json(one.answer().decode()) for key, one in held.items() if key not in elsewhere
            },
            "buckets to tune": list(todo),
            "tactic lists": {str(bucket): flashinfer_api.first_offer(case.call, bucket) for bucket in todo},
        },
        f"before {op.name}",
        group,
    )
    return todo


def _shared_with_some(session: Session, index: int) -> list[int]:
    """Earlier ops that some of this op's ranks have tuned and others have not, such as those of one pipeline stage."""
    everyone = holders(session.plan, session.ranks.world)
    mine = set(everyone[index])
    return [i for i in range(index) if session.strategy.together and mine & set(everyone[i]) not in (mine, set())]


def _known_to_some(session: Session, index: int) -> set[str]:
    """The entries of these ops, which only some ranks have.

    The contract does not compare them. One that answers for this op shows as a difference in "buckets to tune".
    """
    apart = _shared_with_some(session, index)
    theirs = {key for i in apart for key in session.used.get(i, ())}
    common = {key for i, keys in session.used.items() if i not in apart for key in keys}
    return theirs - common - session.began_with


def _unanswered(session: Session, index: int) -> tuple[int, ...]:
    """The buckets of an op for which no entry is there already; notes the entries of the others."""
    op = session.plan.ops[index]
    if not session.began_with and not _shared_with_some(session, index):
        return op.buckets
    found: list[int] = []
    keys: set[str] = set()
    with settings(session.plan, op, tune=False):
        for bucket in op.buckets:
            lookups = call(session.tuner, session.cases[index], bucket).lookups
            if lookups and all(lookup.hit for lookup in lookups):
                keys.update(lookup.key for lookup in lookups)
            else:
                found.append(bucket)
    session.tuner.idle()
    session.used[index] = sorted(keys)
    return tuple(found)


def _tune_op(session: Session, index: int, buckets: Sequence[int], gather: Gather) -> None:
    """Tune, compare, check and write these buckets of an op; `gather` reaches the ranks that do the same."""
    plan, tuner, op = session.plan, session.tuner, session.plan.ops[index]
    part: OpPlan = replace(op, buckets=tuple(buckets))
    before = flashinfer_api.entries(tuner).keys()
    torch.manual_seed(seed_for(plan.seed, "profiles", index))  # FlashInfer draws its own inputs from the global state
    session.ranks.steps.say(f"tuning {op.name} ({op.op}), {len(buckets)} buckets", op=index + 1)
    tuner.watch.clear()
    with session.phase("measuring"), settings(plan, part, tune=True):
        # In tuning mode FlashInfer measures all buckets of `settings`, whichever it is called with
        session.cases[index].call(part.buckets[-1])
    session.measured.add(op, tuner.watch.samples)
    hits = {lookup.key for lookup in tuner.watch.lookups if lookup.hit}
    with session.phase("comparing"):
        compare_op(session, part, session.cases[index], before, gather)
    with session.phase("verifying"):
        check_choices(session, _to_check(session, index, part), session.cases[index], before, gather)
    now_known = flashinfer_api.entries(tuner).keys()  # comparing may have moved an entry to another runner
    known = set(session.used.get(index, ()))
    session.used[index] = sorted(known | (hits & now_known) | (now_known - before))
    _write_finished(session, index, part, gather)


def _to_check(session: Session, index: int, part: OpPlan) -> OpPlan:
    """What this rank checks of what it measured: where ranks chose together, one of them checks each bucket.

    The same tactic on the same inputs gives the same result on each of them, and a replay runs everything on all.
    A MoE layer is another one on each rank, which checks its own.
    """
    if not session.strategy.together or {"tp", "ep"} & set(part.shape):
        return part
    together = holders(session.plan, session.ranks.world)[index]
    # Dealt from the largest on, in ascending order again
    return replace(part, buckets=part.buckets[::-1][together.index(session.ranks.rank) :: len(together)][::-1])


def _write_finished(session: Session, index: int, part: OpPlan, gather: Gather) -> None:
    """Write the finished buckets of an op, once the ranks that measured it agree; the first of them writes.

    Raises `CoverageMissing` where the tuning left a hole and `TacticsDiffer` where ranks chose differently, which
    would otherwise be found at the end. Where the file cannot be written, a note says so. Independent ranks write
    nothing: what they choose is worth nothing until all have chosen.
    """
    place, rank = session.options.state, session.ranks.rank
    if place is None or session.strategy.name == INDEPENDENT:
        return
    rows = cover(session.tuner, session.plan, part, session.cases[index], session.measured)
    held = flashinfer_api.entries(session.tuner)
    mine = {row.entry: held[row.entry] for row in rows}
    results: list[RankResult] = gather(RankResult(rank, mine, {index: sorted(mine)}))
    merge(results, None)
    if results[0].rank == rank:
        terms = checkpoint.terms(session.plan, session.plan.ops[index], session.deciding())
        blocked = [b for b in session.blocked if b["op"] == part.name and b["bucket"] in part.buckets]
        try:
            hooks.at("before_save")
            checkpoint.write_finished(place, terms, rows, mine, blocked=blocked, ended=now())
        except OSError as error:  # a full disk: what is lost is lost only to a run that resumes this one
            session.unkept = f"finished ops could not be kept in --state: {error.strerror}"
