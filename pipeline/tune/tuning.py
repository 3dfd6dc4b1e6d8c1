"""Tuning the ops of a plan: in step with the other ranks, or each rank its own share."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import OpPlan
from pipeline.flashinfer.leader import LEADER
from pipeline.flashinfer.ops import is_skipped

from . import flashinfer_api
from .compare.compare import compare_op
from .compare.decide import Budget
from .coverage import call, settings
from .cpu_shim import cpu_clock
from .guard import stops_rank
from .keeping import keep
from .ops import spec_of
from .ops.reference import seed_for
from .session import Session, holders
from .strategy import SHARDED, deal
from .verify import verify


def tune(session: Session) -> None:
    """Tune every op of the plan that this rank holds, in the plan's order, the way the session's strategy says."""
    clock = cpu_clock() if session.device.type == "cpu" else contextlib.nullcontext()
    with clock, stops_rank(), session.ranks.watched_reductions():
        if session.strategy.in_step:
            _in_step(session)
        else:
            _apart(session)


def _in_step(session: Session) -> None:
    """Every holder of an op measures it, and FlashInfer averages each time over them."""
    at, ranks = flashinfer_api.load(), session.ranks
    _allow(session, sum(len(session.plan.ops[index].buckets) for index, _ in _held(session)))
    for index, group in _held(session):
        buckets = _prepare(session, index, group)
        try:
            at.set_autotune_process_group(group)
            _measure(session, index, buckets, group)
        finally:
            at.set_autotune_process_group(None)
        if buckets:
            keep(session, index, buckets, lambda value, group=group: ranks.gather(value, group))  # type: ignore[misc]


def _apart(session: Session) -> None:
    """The ranks agree on everything first; from then on none waits for another until all have measured their share."""
    todo = {index: _prepare(session, index, group) for index, group in _held(session)}
    share = _share(session, todo)
    _allow(session, sum(map(len, share.values())))
    for index, buckets in share.items():
        _measure(session, index, buckets, None)
        keep(session, index, buckets, _alone)


def _allow(session: Session, buckets: int) -> None:
    """Set the bound of all comparing."""
    session.compare_budget = Budget((session.options.compare_budget or 0.0) * buckets)


def _held(session: Session) -> list[tuple[int, Any]]:
    """The ops that this rank holds, and for each the group of its holders."""
    everyone = holders(session.plan, session.ranks.world)
    return [(i, session.ranks.group(everyone[i])) for i in range(len(session.plan.ops)) if session.holds(i)]


def _share(session: Session, todo: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """What this rank measures of what is to be tuned, by index of the op."""
    rank, everyone = session.ranks.rank, holders(session.plan, session.ranks.world)
    if session.strategy.name == LEADER:
        todo = {index: buckets for index, buckets in todo.items() if everyone[index][0] == rank}
    elif session.strategy.name == SHARDED:
        # All ranks must deal from one list: what is to be tuned of an op is known to its holders only.
        known: list[Mapping[int, Sequence[int]]] = session.ranks.gather(todo)
        return deal(session.plan, {i: b for one in known for i, b in one.items()}, everyone).get(rank, {})
    return {index: tuple(buckets) for index, buckets in todo.items() if buckets}


def _alone(value: Any) -> list[Any]:  # noqa: ANN401 - whatever is gathered
    """What a gather over this rank alone returns."""
    return [value]


def _prepare(session: Session, index: int, group: Any) -> tuple[int, ...]:  # noqa: ANN401 - a ProcessGroup
    """Make an op's inputs, agree with its other holders, and return the buckets to tune, ascending."""
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


def _held_by_some(session: Session, index: int) -> list[int]:
    """The ops before this one that some of its holders have tuned and others do not hold, as of a pipeline's stages."""
    everyone = holders(session.plan, session.ranks.world)
    mine = set(everyone[index])
    return [i for i in range(index) if session.strategy.in_step and mine & set(everyone[i]) not in (mine, set())]


def _known_to_some(session: Session, index: int) -> set[str]:
    """The entries of such ops: no other rank can have them, and this op is not answered by them (`_unanswered`)."""
    apart = _held_by_some(session, index)
    theirs = {key for i in apart for key in session.used.get(i, ())}
    common = {key for i, keys in session.used.items() if i not in apart for key in keys}
    return theirs - common - session.began_with


def _unanswered(session: Session, index: int) -> tuple[int, ...]:
    """The buckets of an op for which no entry is there already; notes the entries of the others."""
    op = session.plan.ops[index]
    if not session.began_with and not _held_by_some(session, index):
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
    session.tuner.tried(None)
    session.used[index] = sorted(keys)
    return tuple(found)


def _to_verify(session: Session, index: int, part: OpPlan, group: Any) -> OpPlan:  # noqa: ANN401
    """What this rank verifies of what it measured: where ranks chose together, one of them verifies each bucket.

    The same tactic on the same inputs gives the same result on each of them, and a replay runs everything on all.
    A MoE layer is another one on each rank, which verifies its own.
    """
    if group is None or {"tp", "ep"} & set(part.shape):
        return part
    together = holders(session.plan, session.ranks.world)[index]
    return replace(part, buckets=part.buckets[::-1][together.index(session.ranks.rank) :: len(together)][::-1])


def _measure(session: Session, index: int, buckets: Sequence[int], group: Any) -> None:  # noqa: ANN401
    """Let FlashInfer tune these buckets of an op, then compare and verify. `group` is None where this rank is alone."""
    plan, tuner, op = session.plan, session.tuner, session.plan.ops[index]
    if not buckets:
        return
    part: OpPlan = replace(op, buckets=tuple(buckets))
    before = flashinfer_api.entries(tuner).keys()
    torch.manual_seed(seed_for(plan.seed, "profiles", index))  # FlashInfer draws its own inputs from the global state
    session.ranks.steps.say(f"tuning {op.name} ({op.op}), {len(buckets)} buckets", op=index + 1)
    tuner.watch.clear()
    with session.phase("measuring"), settings(plan, part, tune=True):
        session.cases[index].call(part.buckets[-1])
    session.measured.add(op, tuner.watch.samples)
    hits = {lookup.key for lookup in tuner.watch.lookups if lookup.hit}
    gather = _alone if group is None else lambda value: session.ranks.gather(value, group)
    with session.phase("comparing"):
        compare_op(session, part, session.cases[index], before, gather)
    with session.phase("verifying"):
        verify(session, _to_verify(session, index, part, group), session.cases[index], before, gather)
    now = flashinfer_api.entries(tuner).keys()  # comparing may have moved an entry to another runner
    known = set(session.used.get(index, ()))
    session.used[index] = sorted(known | (hits & now) | (now - before))
