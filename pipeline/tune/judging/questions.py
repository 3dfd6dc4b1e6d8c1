"""What an op asks the AutoTuner at a bucket, and at the other counts that the same entry answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.contract.plan import OpPlan, Plan
from pipeline.tune.coverage import settings
from pipeline.tune.tokens import judged_tokens
from pipeline.tune.tuner import ObservedTuner, Question

if TYPE_CHECKING:
    from pipeline.tune.ops import Case

Key = tuple[int, int, int]  # the op's index in the plan, the bucket, and which of the entries that answer there


def questions(tuner: ObservedTuner, plan: Plan, op: OpPlan, case: Case, bucket: int) -> list[list[Question]]:
    """For each entry that answers at `bucket`: its question there, and at other counts that it answers.

    In the order in which the op asks, which is the same in every process; where nothing is loaded, a miss stands for
    its entry.
    """
    counts = [bucket] if getattr(case, "one_point", False) else judged_tokens(op, plan, bucket)
    found: dict[str, list[Question]] = {}
    with settings(plan, op, tune=False):
        for tokens in counts:
            for question in _ask(tuner, case, tokens):
                if tokens == bucket or question.lookup.key in found:
                    found.setdefault(question.lookup.key, []).append(question)
    return list(found.values())


def _ask(tuner: ObservedTuner, case: Case, tokens: int) -> list[Question]:
    watch = tuner.watch
    watch.clear()
    watch.questions = []
    try:
        case.call(tokens)
        return watch.questions
    finally:
        watch.questions = None
        tuner.tried(None)
