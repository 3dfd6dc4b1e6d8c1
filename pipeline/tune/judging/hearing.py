"""The sittings of one key: made, timed and ended together by all ranks that hold the op.

Whatever steers the course is gathered first, and the slowest rank and the smallest allowance count, so that every rank
takes the same turn and calls the same number of collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.tune import flashinfer_api
from pipeline.tune.attempt import Attempt
from pipeline.tune.steps import Steps
from pipeline.tune.tuner import Question

from . import rule
from .bench import Bench, Candidate
from .benches import bench
from .budget import Budget, Turn
from .jury import Jury

Gather = Callable[[Any], list[Any]]

_SCREEN = 3  # rounds that find the leading candidates


@dataclass(frozen=True)
class Told:
    """The candidates of a bench as the rank's step file has them."""

    steps: Steps
    attempts: Sequence[Attempt]

    def now(self, number: int | None) -> None:
        """As `Trying` has it."""
        self.steps.attempt(None if number is None else self.attempts[number])

    def often(self, numbers: Sequence[int]) -> Callable[[int], None]:
        """As `Trying` has it."""
        return self.steps.attempts({number: self.attempts[number] for number in numbers})


@dataclass(frozen=True)
class Hearing:
    """One key at the token counts of `points`, which its entry answers; the first is the bucket.

    `where` is the op's index in the plan, the bucket, and which of the entries that answer there.
    """

    steps: Steps
    device: torch.device
    budget: Budget
    gather: Gather
    where: tuple[int, int, int]
    points: Sequence[Question]
    turn: Turn
    jury: Jury

    def hold(
        self, candidates: Sequence[Candidate], tick: Callable[[str], None]
    ) -> tuple[list[list[rule.Round]], dict[int, str], str]:
        """All sittings, none where there is no time for any; which candidates failed; why a rank could not go on."""
        turn = self.turn
        self._meet()
        if not turn.fits(self.budget.building):
            return [], {}, ""
        trial, error, failed = self._build(candidates)
        if trial is None or error or 0 in failed:
            return [], failed, error or failed.get(0, "a rank has no bench")
        tick(f"{len(candidates)} candidates")
        seats = self._seats()
        first = self._first(trial, [n for n in range(len(candidates)) if n not in failed], len(seats))
        sittings = [first] if first else []
        if first:
            self._sit_again(candidates, sittings, trial, seats, tick)
        return sittings, failed, ""

    def _first(self, trial: Bench, alive: list[int], processes: int) -> list[rule.Round]:
        """The first sitting: of those that a quick look does not rule out; nothing where there is no time for it."""
        quick = self._together(trial, alive, _SCREEN, quick=True)
        fastest = {c: min(math.fsum(one[c]) / len(one[c]) for one in quick) for c in alive}
        alive = rule.leading({c: math.exp(value) for c, value in fastest.items()}, processes)
        rounds = rule.FIRST_OF_TWO if processes > 1 else rule.FIRST
        return self._together(trial, alive, rounds) if self.turn.fits(self._takes(rounds, alive)) else []

    def _takes(self, rounds: int, alive: Sequence[int]) -> float:
        """Seconds of so many rounds, by the last ones."""
        return self.turn.round_seconds * rounds * len(alive)

    def _sit_again(
        self,
        candidates: Sequence[Candidate],
        sittings: list[list[rule.Round]],
        first: Bench,
        seats: list[int],
        tick: Callable[[str], None],
    ) -> None:
        """What seems better than the default must be so with its tensors in other memory too: further sittings.

        They go round the processes, this one and its jurors. `first` and each later bench are kept until the end: what
        is freed would be handed out again.
        """
        kept: list[Bench] = [first]
        turn, looks = self.turn, rule.first_sittings(len(seats))
        alive = sorted(sittings[0][-1])
        while len(sittings) < rule.MOST_SITTINGS:
            if len(sittings) == looks:
                alive = rule.contenders(sittings, len(seats))
            turn.clear = turn.clear or alive == [0]
            if turn.clear or not turn.fits(self.budget.building + self._takes(rule.SITTING, alive)):
                return
            tick(f"{len(alive)} candidates, sitting {len(sittings)}")
            seat = seats[len(sittings) % len(seats)]
            running = [candidates[number] for number in alive]
            more = self._elsewhere(seat, running, tick) if seat else self._here(running, kept)
            if more is None and seat == 0:
                return
            if more is None:
                seats.remove(seat)
                continue
            turn.seats.append(seat)
            sittings.append([{alive[place]: times for place, times in one.items()} for one in more])
            if len(sittings) >= rule.LEAST_SITTINGS:
                verdict = rule.settle(sittings, turn.seats)
                turn.clear = verdict.clear
                alive = [number for number in alive if number not in verdict.drop]

    def _seats(self) -> list[int]:
        """This process (0) and the jurors, by number, that all ranks that hold the op still have."""
        said = self.gather(sorted(self.jury.jurors))
        return [0, *sorted(set.intersection(*map(set, said)))]

    def _here(self, candidates: Sequence[Candidate], kept: list[Bench]) -> list[rule.Round] | None:
        """A sitting in this process; None where a rank cannot."""
        trial, error, failed = self._build(candidates)
        if trial is None or error or failed:
            return None
        kept.append(trial)
        return self._together(trial, list(range(len(candidates))), rule.SITTING)

    def _elsewhere(
        self, number: int, candidates: Sequence[Candidate], tick: Callable[[str], None]
    ) -> list[rule.Round] | None:
        """A sitting with every rank's juror of that number; None where one fails, which all then do without."""
        mine, why = self.jury.sit(number, self.where, candidates, rule.SITTING, tick)
        said: list[tuple[list[rule.Round], str]] = self.gather((mine, why))
        self._meet()
        wrong = next((f"on rank {rank}: {one}" for rank, (_, one) in enumerate(said) if one), "")
        if wrong:
            self.jury.dismiss(number, wrong)
            return None
        return _mean([rounds for rounds, _ in said])

    def _build(self, candidates: Sequence[Candidate]) -> tuple[Bench | None, str, dict[int, str]]:
        """A bench; why some rank has none; which candidates failed on some rank."""
        trial, error, began, told = None, "", time.monotonic(), self._told(candidates)
        try:
            trial = bench(self.points, candidates, self.device, told, self.where[1])
        except Exception as failure:  # noqa: BLE001 - no memory for the copies, for one
            told.now(None)
            error = f"{type(failure).__name__}: {failure}"
        said = self.gather((error, dict(trial.failed) if trial else {}, time.monotonic() - began))
        self.budget.building = max(seconds for _, _, seconds in said)
        self._meet()
        failed = {number: why for _, one, _ in said for number, why in one.items()}
        return trial, next((one for one, _, _ in said if one), ""), failed

    def _told(self, candidates: Sequence[Candidate]) -> Told:
        first, found = self.points[0], []
        for one in candidates:
            runner = type(first.runners[one.runner]).__name__
            tactic = flashinfer_api.tactic_json(one.tactic)
            found.append(Attempt(first.custom_op, runner, tactic, first.lookup.profile, self.where[1]))
        return Told(self.steps, found)

    def _together(self, trial: Bench, alive: list[int], count: int, *, quick: bool = False) -> list[rule.Round]:
        """Everybody's rounds as one: the mean of the logarithmic times over the ranks."""
        began = time.monotonic()
        mine = trial.rounds(alive, count, quick=quick)
        said = self.gather((mine, time.monotonic() - began))
        self.turn.round_seconds = max(seconds for _, seconds in said) / (count * len(alive))
        self._meet()
        return _mean([rounds for rounds, _ in said])

    def _meet(self) -> None:
        """Agree on what this key has taken, and what it may: the longest and the least of any rank."""
        said = self.gather((time.monotonic() - self.turn.began, self.budget.allow()))
        self.turn.elapsed = max(elapsed for elapsed, _ in said)
        self.turn.allowed = min(allowed for _, allowed in said)


def _mean(ranks: Sequence[Sequence[rule.Round]]) -> list[rule.Round]:
    """The rounds of several ranks as one: the mean of the logarithmic times."""
    return [
        {
            c: tuple(math.fsum(times) / len(times) for times in zip(*(one[c] for one in same), strict=True))
            for c in same[0]
        }
        for same in zip(*ranks, strict=True)
    ]
