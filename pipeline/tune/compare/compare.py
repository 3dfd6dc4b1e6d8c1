"""Comparing on all ranks that hold an op: each times the same rounds, all decide from everybody's times.

Whatever steers the course (candidates, failures, seconds) is gathered first, so that every rank takes the same turn and
calls the same number of collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contract.digest import canonical_json
from pipeline.contract.plan import OpPlan
from pipeline.tune import flashinfer_api
from pipeline.tune.guard import OUT_OF_MEMORY
from pipeline.tune.steps import Attempt, identity
from pipeline.tune.tuner import Question

from . import clock, decide, timing
from .decide import Batch, Key
from .second import entries_at
from .timing import DEFAULT, Answer, Asked, Candidate, Tell, time_entries, words

if TYPE_CHECKING:
    from pipeline.tune.ops import Case
    from pipeline.tune.session import Session

Gather = Callable[[Any], list[Any]]

_TOGETHER = 8  # buckets that are timed in one go, where both states of the clock count


@dataclass
class Contest:
    """One entry and its candidates. `points` are the token counts that it answers, the bucket first.

    `processes` are the batches of each process that timed it, `failed` the candidates that did not run in one of them.
    `error` says why it cannot be compared, `short` why it keeps the default.
    """

    key: Key
    points: Sequence[Question]
    candidates: list[Candidate]
    processes: list[Sequence[Batch]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    error: str = ""
    short: str = ""

    @property
    def alive(self) -> dict[int, Candidate]:
        """The candidates by number, without those that failed."""
        return {number: one for number, one in enumerate(self.candidates) if number not in self.failed}

    def offer(self) -> dict[int, tuple[int, Any]]:
        """Those as JSON values: place of the runner, tactic."""
        return {n: (one.runner, flashinfer_api.tactic_json(one.tactic)) for n, one in self.alive.items()}


def compare_op(session: Session, op: OpPlan, case: Case, known: Collection[str], gather: Gather) -> None:
    """Compare every entry that an op has gained beyond `known`, and set what is decided in its place.

    `op` may have some of its buckets only; `gather` collects a value from the ranks that hold the op.
    """
    if session.options.compare == "off":
        return
    with torch.no_grad():
        for buckets in _groups(op.buckets, alone=getattr(case, "bucket_only", False)):
            _Comparison(session, op, case, gather).run(buckets, known)


def _groups(buckets: Sequence[int], *, alone: bool) -> list[Sequence[int]]:
    """Which buckets are timed in one go: evenly shared out where both states of the clock count, else one by one."""
    shared = [one for one in buckets if not alone and one >= clock.BOTH_FROM]
    times = math.ceil(len(shared) / _TOGETHER)
    ends = [len(shared) * number // max(1, times) for number in range(times + 1)]
    single: list[Sequence[int]] = [[one] for one in buckets if one not in shared]
    return single + [shared[a:b] for a, b in pairwise(ends)]


@dataclass
class _Comparison:
    """Some buckets of one op."""

    session: Session
    op: OpPlan
    case: Case
    gather: Gather

    def run(self, buckets: Sequence[int], known: Collection[str]) -> None:
        """Compare the new entries at these buckets in one go; where a rank cannot, bucket by bucket."""
        session, began = self.session, time.monotonic()
        session.ranks.steps.say(f"comparing {self.op.name} ({self.op.op}) at {', '.join(map(str, buckets))} tokens")
        contests, error = self._contests(buckets, known)
        offers = [list(one.offer().values()) for one in contests]
        said: list[tuple[str, float, list[Any]]] = self.gather((error, session.compare_budget.spent, offers))
        error = next((one for one, _, _ in said if one), "")
        if not error:
            _agree(contests, [theirs for _, _, theirs in said])
            if max(spent for _, spent, _ in said) > session.compare_budget.seconds:
                session.compare_budget.short += len(contests)
                for contest in contests:
                    contest.short = "the time for comparing was used up"
            else:
                error = self._time(contests, together=len(buckets) > 1)
        if error and len(buckets) > 1:  # there may have been no memory for all at once
            del contests
            for bucket in buckets:
                self.run([bucket], known)
            return
        if error:
            session.notes.append(f"{self.op.name} at {buckets[0]} tokens was not compared: {error}")
            return
        for contest in contests:
            self._keep(contest)
        session.compare_budget.spent += max(self.gather(time.monotonic() - began))

    def _contests(self, buckets: Sequence[int], known: Collection[str]) -> tuple[list[Contest], str]:
        """The entries at these buckets that are new; or why this rank cannot find them, such as for want of memory."""
        session = self.session
        served = next(one for one in session.plan.ops if one.name == self.op.name)
        place = session.plan.ops.index(served)
        try:
            return [
                Contest((place, bucket, number), points, self._candidates(bucket, points[0]))
                for bucket in buckets
                for number, points in enumerate(entries_at(session.tuner, session.plan, served, self.case, bucket))
                if points[0].lookup.hit
                and points[0].lookup.key not in known
                and points[0].lookup.key not in session.measured.compared
            ], ""
        except OUT_OF_MEMORY as failure:
            timing.cuda_of(session.device).empty_cache()
            return [], words(failure)

    def _candidates(self, bucket: int, question: Question) -> list[Candidate]:
        """The default, and the few that FlashInfer found fastest, in the order in which they were offered."""
        session = self.session
        samples = session.measured.samples(self.op, question.custom_op, question.lookup.profile)
        times: dict[tuple[str, str], float] = {}
        for one in samples:
            name = (one.runner, canonical_json(one.tactic).decode())
            times[name] = min(one.time_ms, times.get(name, math.inf))
        blocked = {
            (one["runner"], canonical_json(one["tactic"]).decode())
            for one in session.blocked
            if (one["op"], one["bucket"], one["custom_op"]) == (self.op.name, bucket, question.custom_op)
        }
        found: list[tuple[float, int, Candidate]] = []
        for order, (runner, tactic) in enumerate(question.offered):
            owner, value = type(question.runners[runner]).__name__, flashinfer_api.tactic_json(tactic)
            known = (owner, canonical_json(value).decode())
            crashed = identity(question.custom_op, owner, value, question.lookup.profile) in session.tuner.banned
            if tactic != -1 and not crashed and known not in blocked and math.isfinite(times.get(known, 0.0)):
                found.append((times.get(known, math.inf if times else 0.0), order, Candidate(runner, tactic)))
        fastest = sorted(found, key=lambda one: one[:2])[: decide.CANDIDATES]
        return [DEFAULT, *(one for _, _, one in sorted(fastest, key=lambda one: one[1]))]

    def _time(self, contests: list[Contest], *, together: bool) -> str:
        """Time entries in this process, then in the second; why several could not be timed in one go."""
        device = self.session.device
        # Entries of one bucket that share a runner share its workspace: one at a time
        for some in [contests] if together and contests else [[contest] for contest in contests]:
            asked = [Asked(one.points, one.alive, one.key[1], self._tell(one)) for one in some]
            self._add(some, time_entries(device, asked, decide.ROUNDS))
            error = next((contest.error for contest in some if contest.error), "")
            if error and together:
                return error
            self._time_again([contest for contest in some if not contest.error and len(contest.alive) > 1])
        return ""

    def _add(self, contests: Sequence[Contest], answers: Sequence[Answer]) -> None:
        """Add what one process of every rank has timed."""
        said = self.gather(list(answers))
        for place, contest in enumerate(contests):
            theirs = [rank[place] for rank in said]
            for one in theirs:
                contest.failed |= one.failed
            default = f"the default fails: {contest.failed[0]}" if 0 in contest.failed else ""
            contest.error = next((one.error for one in theirs if one.error), default)
            if not contest.error:
                contest.processes.append(_mean_of([one.batches for one in theirs]))

    def _time_again(self, contests: Sequence[Contest]) -> None:
        """Time entries in every rank's second process; what it cannot time keeps the default."""
        session = self.session
        if not contests or session.second.pool is None:
            return
        asked = [(contest.key, contest.offer()) for contest in contests]
        answers, why = session.second.time(asked, decide.ROUNDS, session.ranks.steps.tick)
        said: list[tuple[int, str]] = self.gather((session.ranks.rank, why))
        lost = next((f"on rank {rank}: {why}" for rank, why in said if why), "")
        if lost:
            session.second.dismiss(lost)
            return
        self._add(contests, answers)
        for contest in contests:
            if contest.error:
                contest.error, contest.short = "", f"the second process could not time it: {contest.error}"

    def _keep(self, contest: Contest) -> None:
        """Set the entry to what was decided: the default where the times of a process are lacking, FlashInfer's choice
        where those of all are.
        """
        session, question = self.session, contest.points[0]
        if session.second.wanted and len(contest.processes) < 2 and len(contest.alive) > 1:
            contest.short = contest.short or "it was timed in one process only"
        if contest.error:
            session.measured.compared[question.lookup.key] = {"note": f"not compared: {contest.error}"}
            return
        choice = decide.KEEP_DEFAULT if contest.short or not contest.processes else decide.decide(contest.processes)
        chosen = contest.candidates[choice.chosen] if choice.chosen else DEFAULT
        key = flashinfer_api.set_entry(session.tuner, question, chosen.runner, chosen.tactic)
        session.measured.compared[key] = {
            "time_ms": _median(contest, choice.chosen),
            "default_ms": _median(contest, 0),
            "ratio": round(choice.ratio, 6),
            "spread": round(choice.spread, 6),
            "decided_by": choice.decided_by,
            "note": f"the default: {contest.short}" if contest.short else "",
        }

    def _tell(self, contest: Contest) -> Tell:
        """Note which candidate runs, in case it ends this process or never returns."""
        first, steps = contest.points[0], self.session.ranks.steps
        attempts = [
            Attempt(
                first.custom_op,
                type(first.runners[one.runner]).__name__,
                flashinfer_api.tactic_json(one.tactic),
                first.lookup.profile,
                contest.key[1],
            )
            for one in contest.candidates
        ]
        return lambda number: steps.attempt(None if number is None else attempts[number])


def _agree(contests: Sequence[Contest], said: Sequence[Sequence[Any]]) -> None:
    """Keep the candidates that all ranks list, in the order of the first."""
    for place, contest in enumerate(contests):
        first, *others = (rank[place] for rank in said)
        wanted = [one for one in first if all(one in other for other in others)]
        contest.candidates = [Candidate(runner, flashinfer_api.tactic_of(tactic)) for runner, tactic in wanted]


def _mean_of(ranks: Sequence[Sequence[Batch]]) -> list[Batch]:
    """The batches of several ranks as one: the mean of the logarithmic times."""
    return [
        [
            {
                c: tuple(math.fsum(times) / len(times) for times in zip(*(one[c] for one in same), strict=True))
                for c in same[0]
                if all(c in one for one in same)
            }
            for same in zip(*batches, strict=True)
        ]
        for batches in zip(*ranks, strict=True)
    ]


def _median(contest: Contest, candidate: int) -> float | None:
    """Milliseconds at the bucket: the median over the rounds."""
    times = sorted(
        one[candidate][0] for process in contest.processes for batch in process for one in batch if candidate in one
    )
    return round(math.exp(times[len(times) // 2]), 6) if times else None
