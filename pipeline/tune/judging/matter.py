"""One key before the judge: what is asked of it, what its hearing has found so far, and how its steps are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.tune.attempt import Attempt
from pipeline.tune.steps import Steps
from pipeline.tune.tuner import Question

from . import rule
from .bench import Candidate
from .questions import Key


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


@dataclass
class Matter:
    """One key before the judge, and what its hearing finds.

    `points` are the token counts that the entry answers, the bucket first. `running` are the candidates that go on to
    the next sitting. Of each sitting there are its rounds, and in `seats` whose process it was in: 0 is the rank's own.
    `clear` says that more time would change nothing, `short` that there was no time for more, `failed` which candidates
    cannot be timed, `error` why a rank could not begin, `stopped` why one could not time them again; `without` says of
    which jurors, by number, one could not, and why: the key has its sittings in the other processes.
    """

    where: Key
    points: Sequence[Question]
    candidates: Sequence[Candidate]
    running: list[int] = field(default_factory=list)
    sittings: list[list[rule.Round]] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    clear: bool = False
    short: bool = False
    error: str = ""
    stopped: str = ""
    without: dict[int, str] = field(default_factory=dict)

    def goes_on(self, seats: Sequence[int], looks: int) -> bool:
        """Whether it comes to one more sitting in one of `seats`. After the first `looks`, find who comes to that."""
        if len(self.sittings) == looks:
            self.running = rule.contenders(self.sittings, len(set(seats) - set(self.without)))
        self.clear = self.clear or self.running == [0]
        return not (self.clear or self.stopped) and len(self.sittings) < rule.MOST_SITTINGS

    def asked(self) -> tuple[Key, list[Candidate], int]:
        """What a juror is asked: the candidates that are running, and how many times each has in a round."""
        return self.where, [self.candidates[number] for number in self.running], len(self.sittings[0][0][0])

    def rule_out(self, failed: Mapping[int, str]) -> None:
        """Candidates that failed in one of the processes, as they may in a server's: none of them can be chosen."""
        self.failed |= failed
        self.running = [number for number in self.running if number not in failed]
        self.sittings = [
            [{number: times for number, times in one.items() if number not in failed} for one in sitting]
            for sitting in self.sittings
        ]

    def sat(self, seat: int, told: Sequence[rule.Round]) -> None:
        """Note a sitting of those that were running; drop who needs no more."""
        self.seats.append(seat)
        self.sittings.append([{self.running[place]: times for place, times in one.items()} for one in told])
        if len(self.sittings) >= rule.LEAST_SITTINGS:
            verdict = rule.settle(self.sittings, self.seats)
            self.clear = verdict.clear
            self.running = [number for number in self.running if number not in verdict.drop]


def buckets_of(matters: Sequence[Matter]) -> int:
    """How many buckets these keys of one op are for."""
    return len({matter.where[1] for matter in matters})
