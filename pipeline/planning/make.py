"""Model, layout, device and versions → Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.contract.digest import sha256_json
from pipeline.contract.plan import Layout, OpPlan, Plan, Untuned

from .buckets import default_buckets, own_buckets
from .facts import read_facts
from .find import find_model
from .gemms import Gemm, gemms
from .problems import Problems

SEED = 20240229


def _cpu_op(gemm: Gemm, buckets: tuple[int, ...]) -> OpPlan:
    return OpPlan(
        name=gemm.name,
        op="cpu_mm",
        shape={"n": gemm.n, "k": gemm.k},
        dtypes={"a": "float32", "b": "float32", "out": "float32"},
        buckets=buckets,
        layers=gemm.layers,
    )


def _merged(planned: Sequence[OpPlan]) -> tuple[OpPlan, ...]:
    """One op for all that would be tuned alike, its names joined with `+`."""
    groups: dict[str, list[OpPlan]] = {}
    for op in planned:
        groups.setdefault(sha256_json(op.meaning()), []).append(op)
    return tuple(
        replace(same[0], name="+".join(op.name for op in same), layers=sum(op.layers for op in same))
        for same in groups.values()
    )


def make_plan(
    model: str,
    *,
    layout: Layout,
    device: str,
    arch: str,
    flashinfer_version: str,
    max_tokens: int | None = None,
    buckets: Sequence[int] | None = None,
    round_up: bool = False,
    skip_ops: Sequence[str] = (),
    ops: Sequence[str] | None = None,
    seed: int = SEED,
    problems: Problems | None = None,
) -> Plan:
    """Make the plan of one model; raise `ModelUnknown`, `ModelUnreadable`, or `PlanRefused` with every problem.

    `ops`, where given, are the only ones planned, by name of the adapter or of the product. `problems` are those that
    the caller has found already, to be told together.
    """
    problems = problems or Problems()
    found = find_model(model)
    facts = read_facts(found.name, found.config, problems)
    problems.check()
    products = gemms(facts, layout, problems)
    if device != "cpu":
        problems.add(f"device {device!r} cannot be planned yet", "plan with --device cpu")
    problems.check()
    counts = own_buckets(buckets, max_tokens) if buckets else default_buckets(device, max_tokens)
    planned: list[OpPlan] = []
    untuned: list[Untuned] = []
    for op in (_cpu_op(gemm, counts) for gemm in products):
        if ops is not None and op.name not in ops and op.op not in ops:
            untuned.append(Untuned(op.name, "not among --ops"))
        else:
            planned.append(op)
    return Plan(
        model=facts.name,
        device=device,
        arch=arch,
        flashinfer_version=flashinfer_version,
        layout=layout,
        ops=_merged(planned),
        round_up=round_up,
        skip_ops=tuple(skip_ops),
        seed=seed,
        untuned=tuple(untuned),
    )
