"""Tuning every op of a plan in step with the other ranks that hold it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pipeline.contract.digest import sha256_json
from pipeline.contract.opnames import is_skipped
from pipeline.contract.plan import OpPlan

from . import flashinfer_api
from .coverage import settings
from .cpu_shim import cpu_clock
from .inputs import seed_for
from .ops import adapter_of
from .session import Session, holders


def tune(session: Session) -> None:
    """Tune every op of the plan that this rank holds, in the plan's order, in step with the other holders."""
    at, ranks = flashinfer_api.load(), session.ranks
    clock = cpu_clock() if session.device.type == "cpu" else contextlib.nullcontext()
    with clock, ranks.watched_reductions():
        for index, op in enumerate(session.plan.ops):
            if not session.holds(index):
                continue
            group = ranks.group(holders(session.plan, ranks.world)[index])
            try:
                at.set_autotune_process_group(group)
                _tune_one(session, index, op, group)
            finally:
                at.set_autotune_process_group(None)


def _tune_one(session: Session, index: int, op: OpPlan, group: Any) -> None:  # noqa: ANN401 - a ProcessGroup
    plan, steps, tuner = session.plan, session.ranks.steps, session.tuner
    steps.say(f"preparing {op.name} ({op.op})", op=index + 1)
    case = session.cases[index] = adapter_of(op).make(op, session.device, plan.seed)
    before = flashinfer_api.entries(tuner)
    session.ranks.contract(
        {
            "op": op.meaning(),
            "buckets": list(op.buckets),
            "skip_ops": sorted(plan.skip_ops),
            "cache entries at entry": {key: sha256_json(held.answer().decode()) for key, held in before.items()},
            "tactic lists": {str(bucket): case.tactics(bucket) for bucket in op.buckets},
        },
        f"before {op.name}",
        group,
    )
    if is_skipped(op.op, plan.skip_ops):
        return
    torch.manual_seed(seed_for(plan.seed, "profiles", index))  # FlashInfer draws its own inputs from the global state
    steps.say(f"tuning {op.name} ({op.op}), {len(op.buckets)} buckets")
    tuner.watch.clear()
    with settings(plan, op, tune=True):
        case.call(op.buckets[-1])
    session.measured.add(op, tuner.watch.samples)
    hits = {lookup.key for lookup in tuner.watch.lookups if lookup.hit}
    session.used[index] = sorted(hits | (flashinfer_api.entries(tuner).keys() - before.keys()))
