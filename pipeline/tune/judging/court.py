"""Judging on all ranks that hold an op: each times the same rounds, all decide from everybody's times.

Whatever steers the course (candidates, failures, seconds) is gathered first, so that every rank takes the same turn
and calls the same number of collectives. A rank that cannot go on says so in the next gathering; all then leave the
key as FlashInfer chose it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contract.digest import canonical_json
from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.coverage import settings
from pipeline.tune.tokens import judged_tokens
from pipeline.tune.tuner import Question

from . import rule
from .bench import DEFAULT, Bench, Candidate, bench
from .budget import Budget
from .judged import Judged

if TYPE_CHECKING:
    from pipeline.tune.ops import Case
    from pipeline.tune.session import Session

Gather = Callable[[Any], list[Any]]

_SCREEN = 3  # rounds that find the leading candidates
_WITHIN, _LEADERS = 0.04, 8  # how near to the fastest a candidate must be, and how many are judged
_HOPELESS = 1.5  # times FlashInfer's own best: not timed again
_SITTINGS = 2  # further ones, for a choice that leaves the default
_CPU_SHARE = 0.2  # a CPU's clock gains little from more rounds


def judge_op(session: Session, op: OpPlan, case: Case, known: Collection[str], gather: Gather) -> None:
    """Judge every entry that an op has gained beyond `known`, and put what was decided in its place.

    `op` may have some of its buckets only; `gather` collects a value from the ranks that hold the op.
    """
    if session.options.judge == "off":
        return
    court = Court(session, op, budget_of(session), gather)
    served = next(one for one in session.plan.ops if one.name == op.name)
    with torch.no_grad():
        for bucket in op.buckets:
            for points in _questions(session, served, case, bucket):
                key = points[0].lookup.key
                if key not in known and key not in session.measured.judged:
                    session.ranks.steps.say(f"judging {op.name} ({op.op}) at {bucket} tokens")
                    court.judge(bucket, points)


def budget_of(session: Session) -> Budget:
    """The session's budget, made when it is first asked for."""
    if session.budget is None:
        ops = [op for index, op in enumerate(session.plan.ops) if session.holds(index)]
        share = _CPU_SHARE if session.device.type == "cpu" else 1.0
        session.budget = Budget(session.options.judge_budget * share, sum(len(op.buckets) for op in ops))
    return session.budget


def _questions(session: Session, op: OpPlan, case: Case, bucket: int) -> list[list[Question]]:
    """For each entry that answers at `bucket`: its question there, and at other counts that it answers."""
    counts = judged_tokens(op, session.plan, bucket)
    if getattr(case, "one_point", False):
        counts = [bucket]
    found: dict[str, list[Question]] = {}
    with settings(session.plan, op, tune=False):
        for tokens in counts:
            for question in _ask(session, case, tokens):
                if question.lookup.hit and (tokens == bucket or question.lookup.key in found):
                    found.setdefault(question.lookup.key, []).append(question)
    return list(found.values())


def _ask(session: Session, case: Case, tokens: int) -> list[Question]:
    watch = session.tuner.watch
    watch.clear()
    watch.questions = []
    try:
        case.call(tokens)
        return watch.questions
    finally:
        watch.questions = None


@dataclass(frozen=True)
class Court:
    """One op before the judge, with what is left of the budget and the ranks that judge together."""

    session: Session
    op: OpPlan
    budget: Budget
    gather: Gather

    def judge(self, bucket: int, points: Sequence[Question]) -> None:
        """Judge one entry, asked for at `points`, and bake what was decided."""
        began, first = time.monotonic(), points[0]
        candidates = self._candidates(bucket, first)
        trial, error = None, ""
        try:
            trial = bench(points, candidates, self.session.device)
        except Exception as failure:  # noqa: BLE001 - no memory for the copies, for one
            error = f"{type(failure).__name__}: {failure}"
        said = self.gather((error, dict(trial.failed) if trial else {}))
        errors = [one for one, _ in said if one]
        failed = {number: why for _, one in said for number, why in one.items()}
        argmin = (first.lookup.runner, first.lookup.tactic)
        if trial is None or errors or 0 in failed:
            why = errors[0] if errors else failed.get(0, "")
            self.session.measured.judged[first.lookup.key] = Judged(
                None, None, None, None, "argmin", len(candidates), len(failed), argmin=argmin, note=f"not judged: {why}"
            )
            return
        rounds, clear = self._try(trial, [n for n in range(len(candidates)) if n not in failed], began)
        sittings = [rounds, *self._sit_again(points, candidates, rounds, trial)]
        verdict = rule.settle(sittings)
        self.budget.take(max(self.gather(time.monotonic() - began)))
        rounds = [one for sitting in sittings for one in sitting]
        chosen = candidates[verdict.chosen]
        key = flashinfer_api.bake(self.session.tuner, first, chosen.runner, chosen.tactic)
        self.session.measured.judged[key] = Judged(
            time_ms=_median(rounds, verdict.chosen),
            default_ms=_median(rounds, 0),
            ratio=round(verdict.ratio, 6),
            spread=round(verdict.spread, 6),
            decided_by=verdict.decided_by,
            candidates=len(candidates),
            failed=len(failed),
            rounds=len(rounds),
            clear=clear,
            argmin=argmin,
            note="" if clear else f"not clear after {len(rounds)} rounds",
        )

    def _sit_again(
        self, points: Sequence[Question], candidates: Sequence[Candidate], rounds: Sequence[rule.Round], first: Bench
    ) -> list[list[rule.Round]]:
        """What was found better than the default must be so with its tensors in other memory too: the two alone.

        `first` and each later bench are kept until the end: what is freed would be handed out again.
        """
        kept: list[Bench] = [first]
        found: list[list[rule.Round]] = []
        alive = [0, rule.judge(rounds).chosen]
        while alive[1] and len(found) < _SITTINGS:
            error = ""
            try:
                kept.append(bench(points, [candidates[number] for number in alive], self.session.device))
                error = "; ".join(kept[-1].failed.values())
            except Exception as failure:  # noqa: BLE001 - no memory, for one
                error = f"{type(failure).__name__}: {failure}"
            if any(self.gather(error)):
                break
            more, _ = self._together(kept[-1].rounds(list(range(len(alive))), rule.SITTING), time.monotonic())
            found.append([{alive[place]: times for place, times in one.items()} for one in more])
        return found

    def _try(self, trial: Bench, alive: list[int], began: float) -> tuple[list[rule.Round], bool]:
        """Screen, then go on in batches until all ranks' times decide or the budget is spent."""
        quick, _ = self._together(trial.rounds(alive, _SCREEN), began)
        fastest = {c: min(math.fsum(one[c]) / len(one[c]) for one in quick) for c in alive}
        alive = rule.leading({c: math.exp(value) for c, value in fastest.items()}, _WITHIN, _LEADERS)
        rounds: list[rule.Round] = []
        while True:
            self.session.ranks.steps.tick(f"{len(alive)} candidates, round {len(rounds)}")
            more, seconds = self._together(trial.rounds(alive, rule.BATCH), began)
            rounds += more
            verdict = rule.judge(rounds)
            settled = len(alive) == 1 or (verdict.clear and len(rounds) >= rule.LEAST)
            if settled or len(rounds) >= rule.MOST or seconds > self.budget.allow():
                return rounds, settled
            alive = [c for c in alive if c not in verdict.drop]

    def _together(self, mine: list[rule.Round], began: float) -> tuple[list[rule.Round], float]:
        """Everybody's rounds as one: the mean of the logarithmic times over the ranks; and the longest time spent."""
        said = self.gather((mine, time.monotonic() - began))
        joined: list[rule.Round] = [
            {
                c: tuple(math.fsum(times) / len(times) for times in zip(*(one[c] for one in same), strict=True))
                for c in same[0]
            }
            for same in zip(*(rounds for rounds, _ in said), strict=True)
        ]
        return joined, max(seconds for _, seconds in said)

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
                known = (name, canonical_json(flashinfer_api.tactic_json(tactic)))
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
