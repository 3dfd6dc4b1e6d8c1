"""The sittings of some keys: made, timed and ended together by all ranks that hold the op.

Whatever steers the course is gathered first, and the slowest rank and the smallest allowance count, so that every rank
takes the same turn and calls the same number of collectives. The keys of one hearing are timed in one go; each leaves
when it is decided.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.tune import flashinfer_api
from pipeline.tune.attempt import Attempt
from pipeline.tune.steps import Steps

from . import rule
from .bench import Bench, Candidate
from .benches import bench, copies_for, rounds
from .budget import Budget, Turn
from .jury import Answer, Jury
from .matter import Matter, Told, buckets_of

Gather = Callable[[Any], list[Any]]

_SCREEN = 3  # rounds that find the leading candidates


@dataclass(frozen=True)
class Hearing:
    """Some keys of one op."""

    steps: Steps
    device: torch.device
    budget: Budget
    gather: Gather
    matters: Sequence[Matter]
    turn: Turn
    jury: Jury

    def hold(self, tick: Callable[[str], None]) -> None:
        """All sittings, none where there is no time for any."""
        self._meet()
        if not self._time_for(self._builds(self.matters), self.matters):
            return
        for matter in self.matters:
            matter.running = list(range(len(matter.candidates)))
        first = self._build(self.matters)
        for matter, trial in zip(self.matters, first, strict=True):
            if trial is None or 0 in matter.failed:
                matter.error = matter.error or matter.failed.get(0, "a rank has no bench")
            matter.running = [number for number in matter.running if number not in matter.failed]
        heard = [
            (matter, trial) for matter, trial in zip(self.matters, first, strict=True) if trial and not matter.error
        ]
        if heard:
            matters, trials = [matter for matter, _ in heard], [trial for _, trial in heard]
            tick(f"{sum(len(matter.candidates) for matter in matters)} candidates")
            seats = self._seats()
            if self._first(matters, trials, len(seats)):
                self._sit_again(matters, trials, seats, tick)

    def _first(self, matters: Sequence[Matter], trials: Sequence[Bench], processes: int) -> bool:
        """The first sitting, of those that a quick look does not rule out; whether there was time for it."""
        quick = self._together(trials, [matter.running for matter in matters], _SCREEN, quick=True)
        for matter, looked in zip(matters, quick, strict=True):
            fastest = {c: min(math.fsum(one[c]) / len(one[c]) for one in looked) for c in matter.running}
            matter.running = rule.leading({c: math.exp(value) for c, value in fastest.items()}, processes)
        count = rule.FIRST_OF_TWO if processes > 1 else rule.FIRST
        if not self._time_for(self._takes(count, matters), matters):
            return False
        told = self._together(trials, [matter.running for matter in matters], count)
        for matter, mine in zip(matters, told, strict=True):
            matter.seats.append(0)
            matter.sittings.append(mine)
        return True

    def _time_for(self, seconds: float, matters: Sequence[Matter]) -> bool:
        """Whether these keys may take so long; they are noted as short of time where not."""
        fits = self.turn.fits(seconds)
        for matter in matters:
            matter.short = not fits
        return fits

    def _builds(self, matters: Sequence[Matter]) -> float:
        """Seconds of making a bench of each, by the last ones."""
        return self.budget.building * len(matters)

    def _takes(self, count: int, matters: Sequence[Matter]) -> float:
        """Seconds of so many rounds, by the last ones."""
        return self.turn.round_seconds * count * sum(len(matter.running) for matter in matters)

    def _sit_again(
        self, matters: Sequence[Matter], first: Sequence[Bench], seats: list[int], tick: Callable[[str], None]
    ) -> None:
        """What seems better than the default must be so with its tensors in other memory too: further sittings.

        They go round the processes, this one and its jurors; a key is left out in turn where a juror cannot time it.
        `first` and each later bench are kept until the end: what is freed would be handed out again.
        """
        kept: list[Bench] = [*first]
        looks, turn, heard = rule.first_sittings(len(seats)), 1, list(matters)
        while heard := [matter for matter in heard if matter.goes_on(seats, looks)]:
            seat = seats[turn % len(seats)]
            able = [matter for matter in heard if seat not in matter.without]
            if able and not self._time_for(self._builds(able) + self._takes(rule.SITTING, able), heard):
                return
            tick(f"{sum(len(matter.running) for matter in able)} candidates, sitting {turn}")
            if seat == 0:
                self._here(able, kept)
            elif able and not self._elsewhere(seat, able, tick):
                seats.remove(seat)
                continue
            turn += 1

    def _seats(self) -> list[int]:
        """This process (0) and the jurors, by number, that all ranks that hold the op still have."""
        said = self.gather(sorted(self.jury.jurors))
        return [0, *sorted(set.intersection(*map(set, said)))]

    def _here(self, matters: Sequence[Matter], kept: list[Bench]) -> None:
        """A sitting in this process, of the keys that every rank can time again."""
        built = self._build(matters)
        able = [(matter, trial) for matter, trial in zip(matters, built, strict=True) if trial is not None]
        if not able:
            return
        kept += [trial for _, trial in able]
        alive = [list(range(len(matter.running))) for matter, _ in able]
        told = self._together([trial for _, trial in able], alive, rule.SITTING)
        for (matter, _), mine in zip(able, told, strict=True):
            matter.sat(0, mine)

    def _elsewhere(self, number: int, matters: Sequence[Matter], tick: Callable[[str], None]) -> bool:
        """A sitting with every rank's juror of that number, of the keys that all of them can time; False where one
        gives no answer at all, and all do without it.
        """
        mine, why = self.jury.sit(number, [matter.asked() for matter in matters], rule.SITTING, tick)
        said: list[tuple[int, list[Answer], str]] = self.gather((self.steps.now.rank, mine, why))
        self._meet()
        lost = next((f"on rank {rank}: {why}" for rank, _, why in said if why), "")
        if lost:
            self.jury.dismiss(number, lost)
            return False
        for place, matter in enumerate(matters):
            answers = [(rank, *told[place]) for rank, told, _ in said]
            unable = [f"on rank {rank}: {why}" for rank, _, why, _ in answers if why]
            if unable:
                matter.without[number] = unable[0]
                matter.rule_out({matter.running[failed]: why for _, _, why, failed in answers if failed})
            else:
                matter.sat(number, _joined([told for _, told, _, _ in answers]))
        return True

    def _build(self, matters: Sequence[Matter]) -> list[Bench | None]:
        """A bench for the running candidates of each key; None where a rank has none.

        None also, but for a key's first bench, where a candidate failed. Of the first, `failed` and `error` of the key
        say which and why.
        """
        built: list[Bench | None] = []
        errors: list[str] = []
        began, copies = time.monotonic(), copies_for(self.device)
        for matter in matters:
            candidates = [matter.candidates[number] for number in matter.running]
            told = self._told(matter, candidates)
            try:
                built.append(bench(matter.points, candidates, self.device, told, matter.where[1], copies=copies))
                errors.append("")
            except Exception as failure:  # noqa: BLE001 - no memory for the copies, for one
                told.now(None)
                built.append(None)
                errors.append(f"{type(failure).__name__}: {failure}")
        failed = [dict(trial.failed) if trial else {} for trial in built]
        said = self.gather((errors, failed, time.monotonic() - began))
        self.budget.building = max(seconds for _, _, seconds in said) / len(matters)
        self._meet()
        for place, matter in enumerate(matters):
            wrong = next((one[place] for one, _, _ in said if one[place]), "")
            found = {matter.running[number]: why for _, one, _ in said for number, why in one[place].items()}
            again = bool(matter.sittings)
            if not again:
                matter.error, matter.failed = wrong, found
            if wrong or (again and found):
                built[place] = None
                matter.stopped = wrong or next(iter(found.values()), "")
        return built

    def _told(self, matter: Matter, candidates: Sequence[Candidate]) -> Told:
        first, found = matter.points[0], []
        for one in candidates:
            runner = type(first.runners[one.runner]).__name__
            tactic = flashinfer_api.tactic_json(one.tactic)
            found.append(Attempt(first.custom_op, runner, tactic, first.lookup.profile, matter.where[1]))
        return Told(self.steps, found)

    def _together(
        self, trials: Sequence[Bench], alive: Sequence[list[int]], count: int, *, quick: bool = False
    ) -> list[list[rule.Round]]:
        """Everybody's rounds as one, for each key: the mean of the logarithmic times over the ranks."""
        began = time.monotonic()
        mine = rounds(list(zip(trials, alive, strict=True)), count, quick=quick)
        said = self.gather((mine, time.monotonic() - began))
        self.turn.round_seconds = max(seconds for _, seconds in said) / (count * sum(map(len, alive)))
        self._meet()
        return _means([told for told, _ in said])

    def _meet(self) -> None:
        """Agree on what these keys have taken and what they may, and what a bench takes: the longest and the least of
        any rank.
        """
        taken = time.monotonic() - self.turn.began
        said = self.gather((taken, self.budget.allow(buckets_of(self.matters)), self.budget.building))
        self.turn.elapsed = max(one for one, _, _ in said)
        self.turn.allowed = min(one for _, one, _ in said)
        self.budget.building = max(one for _, _, one in said)  # ranks may have made their last ones for different ops


def _means(ranks: Sequence[Sequence[Sequence[rule.Round]]]) -> list[list[rule.Round]]:
    """The rounds of several ranks as one, for each key."""
    return [_joined(key) for key in zip(*ranks, strict=True)]


def _joined(ranks: Sequence[Sequence[rule.Round]]) -> list[rule.Round]:
    """The same for one key."""
    return [_mean(same) for same in zip(*ranks, strict=True)]


def _mean(same: Sequence[Mapping[int, Sequence[float]]]) -> rule.Round:
    return {
        c: tuple(math.fsum(times) / len(times) for times in zip(*(one[c] for one in same), strict=True))
        for c in same[0]
    }
