"""Which plans cannot be tuned by a leader alone, and why. Host and ranks both refuse them."""

from __future__ import annotations

from pipeline.contract.errors import UsageError
from pipeline.contract.plan import Plan

LEADER = "leader"  # the strategy in which the first rank that holds an op measures it


class LeaderUnfit(UsageError):
    """Strategy `leader` was asked for, and the leader's work needs the ranks that would wait for it."""


def check_leader(strategy: str, plan: Plan) -> None:
    """Raise `LeaderUnfit` where `strategy` asks for a leader that this plan's ranks cannot wait for."""
    apart = [op.name for op in plan.ops if op.shape.get("ep", 1) > 1]
    if strategy != LEADER or (plan.layout.ep == 1 and not apart):
        return
    what = f"EP={plan.layout.ep}" if plan.layout.ep > 1 else f"{apart[0]} under expert parallelism"
    raise LeaderUnfit(
        f"--strategy leader with {what}: in an all-to-all the leader needs the other ranks, "
        "and ranks that wait for a leader time out",
        hint="use --strategy synchronized or sharded",
    )
