"""Which plans cannot be tuned by a leader alone, and why: for who starts the ranks and for who tunes."""

from __future__ import annotations

from .plan import Plan

REMEDY = "use --strategy synchronized or sharded"


def leader_unfit(plan: Plan) -> str:
    """The refusal of `--strategy leader` for a plan with its reason, in one line; empty where it may be asked for."""
    apart = [op.name for op in plan.ops if op.shape.get("ep", 1) > 1]
    if plan.layout.ep == 1 and not apart:
        return ""
    what = f"EP={plan.layout.ep}" if plan.layout.ep > 1 else f"{apart[0]} under expert parallelism"
    return (
        f"--strategy leader with {what}: in an all-to-all the leader needs the other ranks, "
        "and ranks that wait for a leader time out"
    )
