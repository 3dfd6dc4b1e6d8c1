"""What an op asks the AutoTuner at a bucket, and at the other token counts that the same entry answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.contract.plan import OpPlan, Plan
from pipeline.tune.coverage import settings
from pipeline.tune.tokens import compared_tokens
from pipeline.tune.tuner import ObservedTuner, Question

from .decide import Batch, Key

if TYPE_CHECKING:
    from pipeline.tune.ops import Case

    from .timing import Candidate


@dataclass
class Entry:
    """One entry and its candidates. `points` are the token counts that it answers, the bucket first.

    `processes` are the batches of each process that timed it, `alive` the candidates that ran in all of them. `error`
    says why it cannot be compared, `short` why it keeps the default.
    """

    key: Key
    points: Sequence[Question]
    candidates: list[Candidate] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    processes: list[Sequence[Batch]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    error: str = ""
    short: str = ""


def entries_at(tuner: ObservedTuner, plan: Plan, op: OpPlan, case: Case, bucket: int) -> list[list[Question]]:
    """For each entry that answers at `bucket`: its question there, and at other counts that it answers.

    In the order in which the op asks, which is the same in every process; where nothing is loaded, a miss stands for
    its entry.
    """
    counts = [bucket] if getattr(case, "bucket_only", False) else compared_tokens(op, plan, bucket)
    found: dict[str, list[Question]] = {}
    with settings(plan, op, tune=False):
        for tokens in counts:
            for question in tuner.ask(lambda tokens=tokens: case.call(tokens)):  # type: ignore[misc]
                if tokens == bucket or question.lookup.key in found:
                    found.setdefault(question.lookup.key, []).append(question)
    return list(found.values())
