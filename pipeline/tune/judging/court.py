"""Judging on all ranks that hold an op: each times the same rounds, all decide from everybody's times.

Whatever steers the course (candidates, failures, seconds) is gathered first, so that every rank takes the same turn
and calls the same number of collectives. A rank that cannot go on says so in the next gathering; all then leave the
key as FlashInfer chose it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.contract.digest import canonical_json
from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.attempt import identity
from pipeline.tune.tuner import Question

from . import rule
from .bench import DEFAULT, Candidate
from .benches import together
from .budget import Budget, Turn
from .hearing import Gather, Hearing
from .judged import Judged
from .matter import Matter, buckets_of
from .questions import Key, questions

if TYPE_CHECKING:
    from pipeline.tune.ops import Case
    from pipeline.tune.session import Session

_HOPELESS = 1.5  # times FlashInfer's own best: not timed again


def judge_op(session: Session, op: OpPlan, case: Case, known: Collection[str], gather: Gather) -> None:
    """Judge every entry that an op has gained beyond `known`, and put what was decided in its place.

    `op` may have some of its buckets only; `gather` collects a value from the ranks that hold the op.
    """
    if session.options.judge == "off":
        return
    session.jury.revive(session.ranks.steps.tick)
    court = Court(session, op, budget_of(session), gather)
    with torch.no_grad():
        for buckets in together(session.device, op.buckets):
            court.judge([key for bucket in buckets for key in _gained(session, op, case, bucket, known)])
    session.jury.release(session.ranks.steps.tick)


def _gained(
    session: Session, op: OpPlan, case: Case, bucket: int, known: Collection[str]
) -> list[tuple[Key, list[Question]]]:
    """The entries at a bucket that are new, each with the token counts that it answers."""
    served = next(one for one in session.plan.ops if one.name == op.name)
    place = session.plan.ops.index(served)
    return [
        ((place, bucket, entry), points)
        for entry, points in enumerate(questions(session.tuner, session.plan, served, case, bucket))
        if points[0].lookup.hit
        and points[0].lookup.key not in known
        and points[0].lookup.key not in session.measured.judged
    ]


def budget_of(session: Session) -> Budget:
    """The session's budget, made when it is first asked for."""
    if session.budget is None:
        session.budget = Budget(session.options.judge_budget, session.to_judge)
    return session.budget


@dataclass(frozen=True)
class Court:
    """One op before the judge, with what is left of the budget and the ranks that judge together."""

    session: Session
    op: OpPlan
    budget: Budget
    gather: Gather

    def judge(self, keys: Sequence[tuple[Key, Sequence[Question]]]) -> None:
        """Judge some entries in one hearing, and bake what was decided; what could not be held together, alone."""
        for key in self._judge(keys) if keys else ():  # there may have been no memory for all at once
            self._judge([key])

    def _judge(self, keys: Sequence[tuple[Key, Sequence[Question]]]) -> list[tuple[Key, Sequence[Question]]]:
        """The same; those of several that a rank could not go on with are given back."""
        steps, session = self.session.ranks.steps, self.session
        at = ", ".join(str(bucket) for bucket in dict.fromkeys(bucket for (_, bucket, _), _ in keys))
        steps.say(f"judging {self.op.name} ({self.op.op}) at {at} tokens")
        turn = Turn(time.monotonic())
        matters = [Matter(where, points, self._candidates(where[1], points[0])) for where, points in keys]
        Hearing(steps, session.device, self.budget, self.gather, matters, turn, session.jury).hold(steps.tick)
        alone = [bool(matter.error) and len(keys) > 1 for matter in matters]
        ended = [matter for matter, again in zip(matters, alone, strict=True) if not again]
        self.budget.take(turn.elapsed, buckets_of(ended), short=[matter.short for matter in ended])
        for matter in ended:
            if matter.error:
                self._leave(matter)
            else:
                self._decide(matter, turn.elapsed)
        return [key for key, again in zip(keys, alone, strict=True) if again]

    def _decide(self, matter: Matter, seconds: float) -> None:
        """Bake what the sittings say; the default where there are none."""
        sittings, first, candidates = matter.sittings, matter.points[0], matter.candidates
        enough = len(sittings) >= rule.LEAST_SITTINGS
        verdict = rule.settle(sittings if enough else sittings[:1], matter.seats) if sittings else rule.UNTRIED
        rounds = [one for sitting in sittings for one in sitting]
        chosen = candidates[verdict.chosen]
        key = flashinfer_api.bake(self.session.tuner, first, chosen.runner, chosen.tactic)
        spent = f"undecided after {seconds:.2f} s and {len(rounds)} rounds in {len(sittings)} sittings: by rule"
        spent += f", since it could not be timed again: {matter.stopped}" if matter.stopped else ""
        without = [
            f"no {'further ' * (number in matter.seats)}sitting in juror {number}: {why}"
            for number, why in sorted(matter.without.items())
        ]
        self.session.measured.judged[key] = Judged(
            time_ms=_median(rounds, verdict.chosen) if rounds else None,
            default_ms=_median(rounds, 0) if rounds else None,
            ratio=round(verdict.ratio, 6),
            spread=round(verdict.spread, 6),
            decided_by=verdict.decided_by,
            candidates=len(candidates),
            failed=len(matter.failed),
            rounds=len(rounds),
            clear=matter.clear,
            argmin=(first.lookup.runner, first.lookup.tactic),
            note="; ".join(([] if matter.clear else [spent]) + without),
        )

    def _leave(self, matter: Matter) -> None:
        """Leave the entry as FlashInfer chose it: a rank cannot judge it."""
        lookup, note = matter.points[0].lookup, f"not judged: {matter.error}"
        found = (len(matter.candidates), len(matter.failed))
        self.session.measured.judged[lookup.key] = Judged(
            None, None, None, None, "argmin", *found, argmin=(lookup.runner, lookup.tactic), note=note
        )

    def _candidates(self, bucket: int, question: Question) -> list[Candidate]:
        """The default, then every tactic that FlashInfer did not find hopeless, in the order in which it is offered.

        Only what all ranks list is judged.
        """
        samples = self.session.measured.samples(self.op, question.custom_op, question.lookup.profile)
        times = {(s.runner, canonical_json(s.tactic)): s.time_ms for s in samples}
        best = min(times.values(), default=math.inf)
        banned = {
            (one["runner"], canonical_json(one["tactic"]))
            for one in self.session.blocked
            if (one["op"], one["bucket"], one["custom_op"]) == (self.op.name, bucket, question.custom_op)
        }
        found = [DEFAULT]
        for place, runner in enumerate(question.runners):
            name = type(runner).__name__
            for tactic in runner.get_valid_tactics(question.inputs, None):
                value = flashinfer_api.tactic_json(tactic)
                if identity(question.custom_op, name, value, question.lookup.profile) in self.session.tuner.banned:
                    continue
                known = (name, canonical_json(value))
                if known not in banned and not (times and times.get(known, math.inf) > _HOPELESS * best):
                    found.append(Candidate(place, tactic))
        told = self.gather([(one.runner, flashinfer_api.tactic_json(one.tactic)) for one in found])
        if all(rank == told[0] for rank in told):
            return found
        wanted = [one for one in told[0] if all(one in rank for rank in told)]
        return [Candidate(runner, flashinfer_api.tactic_of(tactic)) for runner, tactic in wanted]


def _median(rounds: Sequence[rule.Round], candidate: int) -> float:
    """Milliseconds at the bucket: the median over the rounds."""
    times = sorted(one[candidate][0] for one in rounds if candidate in one)
    return round(math.exp(times[len(times) // 2]), 6)
