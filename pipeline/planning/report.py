"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.plan import OpPlan, Plan
from pipeline.contract.text import pluralize

from .consumers import found_by_none, summary
from .ops import Target
from .plan import server_command

COLUMNS = ("op", "FlashInfer op", "shape per rank", "dtypes", "buckets", "layers", "backends")
BAKED = (
    "of a server's cold start can be baked: torch.compile, Triton, FlashInfer's compiled modules and tuning, byte code"
)
STAYS = "cannot be baked: pulling the image, importing Python, loading weights, capturing CUDA graphs"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(op: OpPlan) -> tuple[str, ...]:
    shape = " ".join(f"{name}={size}" for name, size in op.shape.items())
    kinds = list(dict.fromkeys(op.dtypes.values()))
    span = f"{len(op.buckets)} ({op.buckets[0]}–{op.buckets[-1]})" if op.buckets[1:] else f"1 ({op.buckets[0]})"
    return op.name, op.op, shape, " → ".join(kinds), span, str(op.layers), ", ".join(op.backends) or "-"


def _gains(plan: Plan, model: str) -> tuple[list[str], list[str]]:
    """What is to be said before everything else, and what after the table, of the servers that gain by a plan."""
    reasons = found_by_none(plan.ops)
    if reasons:
        first = (
            "NO SERVER GAINS BY THIS PLAN: only programs that call FlashInfer themselves look its entries up. "
            f"For a server's cold start: {server_command(model)}"
        )
        return [first, *(f"  {reason}" for reason in reasons), ""], [BAKED, STAYS]
    served = [op.name for op in plan.ops if not op.unserved]
    after = [*summary(plan, Target(plan.device, plan.arch).sm)]
    if len(served) < len(plan.ops):
        after.append(f"--ops {','.join(served)} plans only what a server looks up")
    return [], [*after, BAKED, STAYS, f"to bake them: {server_command(model)}"]


def describe(plan: Plan, model: str = "") -> str:
    """The plan as a table of ops with their shapes per rank, who looks them up, what is left out and why, the digest.

    `model` is what the user typed as MODEL, for commands that the text names.
    """
    sizes = " ".join(f"{name}={getattr(plan.layout, name)}" for name in ("tp", "ep", "pp", "dp"))
    points = sum(len(op.buckets) for op in plan.ops)
    before, after = _gains(plan, model or plan.model)
    lines = [
        *before,
        f"{plan.model} on {plan.device} {plan.arch}, FlashInfer {plan.flashinfer_version}, {sizes}",
        "",
        *_table([COLUMNS, *map(_row, plan.ops)]),
        "",
        ", ".join(
            pluralize(number, what)
            for number, what in ((len(plan.ops), "op"), (points, "op × bucket pair"), (plan.layout.world, "rank"))
        ),
        *after,
    ]
    if plan.skip_ops:
        lines.append(f"skipped: {', '.join(plan.skip_ops)}")
    remarks: dict[str, list[str]] = {}
    for op in plan.ops:
        unserved = [f"no server looks these up: {op.unserved}"] if op.unserved and not before else []
        for note in (*op.notes, *unserved):
            remarks.setdefault(note, []).append(op.name)
    if remarks or plan.notes:
        lines += ["", "notes:"]
        lines += [f"  {note}" for note in plan.notes]
        lines += [f"  {', '.join(names)}: {note}" for note, names in remarks.items()]
    if plan.untuned:
        lines += ["", "left out:"]
        lines += [f"  {part.name}: {part.reason}" for part in plan.untuned]
    return "\n".join([*lines, "", f"digest {plan.digest}"])
