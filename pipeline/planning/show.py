"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.plan import OpPlan, Plan

from .served import found_by_none

_NOBODY = "no server finds these entries, only callers of FlashInfer itself"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(op: OpPlan) -> tuple[str, ...]:
    shape = " ".join(f"{name}={size}" for name, size in op.shape.items())
    kinds = list(dict.fromkeys(op.dtypes.values()))
    span = f"{len(op.buckets)} ({op.buckets[0]}–{op.buckets[-1]})" if op.buckets[1:] else f"1 ({op.buckets[0]})"
    return op.name, op.op, shape, " → ".join(kinds), span, str(op.layers), ", ".join(op.backends) or "-"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe(plan: Plan) -> str:
    """The plan as a table of ops with their shapes per rank, what is left out and why, and the digest."""
    layout = plan.layout
    sizes = " ".join(
        f"{n}={s}" for n, s in (("tp", layout.tp), ("ep", layout.ep), ("pp", layout.pp), ("dp", layout.dp))
    )
    points = sum(len(op.buckets) for op in plan.ops)
    lines = [
        f"{plan.model} on {plan.device} {plan.arch}, FlashInfer {plan.flashinfer_version}, {sizes}",
        "",
        *_table([("op", "adapter", "shape per rank", "dtypes", "buckets", "layers", "backends"), *map(_row, plan.ops)]),
        "",
        f"{_count(len(plan.ops), 'op')}, {_count(points, 'op × bucket pair')}, {_count(layout.world, 'rank')}",
    ]
    if plan.skip_ops:
        lines.append(f"skipped: {', '.join(plan.skip_ops)}")
    remarks: dict[str, list[str]] = {}
    said_once = bool(found_by_none(plan.ops))  # the plan's own notes say it then
    for op in plan.ops:
        nobody = [f"{_NOBODY}: {op.unserved}"] if op.unserved and not said_once else []
        for note in (*op.notes, *nobody):
            remarks.setdefault(note, []).append(op.name)
    if remarks or plan.notes:
        lines += ["", "notes:"]
        lines += [f"  {note}" for note in plan.notes]
        lines += [f"  {', '.join(names)}: {note}" for note, names in remarks.items()]
    if plan.untuned:
        lines += ["", "left out:"]
        lines += [f"  {part.name}: {part.reason}" for part in plan.untuned]
    return "\n".join([*lines, "", f"digest {plan.digest}"])
