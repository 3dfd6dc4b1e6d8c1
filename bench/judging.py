"""A simulation, no measurement: two tunes of one plan, judged by the rule under several kinds of noise.

    python -m bench.judging [KEYS]

For each kind: how many keys the two decide differently, how far apart the two choices truly are where they differ, how
many choices are more than 1 % slower than the default in a fresh process, and what was gained of what could be.

The kinds of noise. Rounds of one sitting scatter by 0.4 % around a common drift, one in twenty five times as much (as
on one H200); beside that

    steady      0.1 % between sittings
    placement   0.4 % between sittings: where tensors lie matters
    heavy       between sittings with heavy tails (Student's t, two degrees of freedom, scale 0.2 %)
    two-state   one candidate in ten is 1 to 12 % slower in some sittings
    process     0.2 % from process to process, three candidates in a hundred 3 %
    all         all of them together
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bench.measure import say
from pipeline.tune.judging import rule
from pipeline.tune.judging.rule import Round

KINDS = ("steady", "placement", "heavy", "two-state", "process", "all")
ROUND = 0.004  # what one round's ratio scatters by on a GPU, relative
_BETWEEN = {"steady": 0.001, "placement": 0.004, "heavy": 0.002, "two-state": 0.001, "process": 0.001, "all": 0.002}


@dataclass(frozen=True)
class Key:
    """The true logarithmic times of one key's candidates, and what they scatter by.

    `slow` holds how often a candidate is in its slow state, and by how much; `wanders` its scatter between processes.
    """

    kind: str
    truth: Mapping[int, float]
    slow: Mapping[int, tuple[float, float]]
    wanders: Mapping[int, float]

    def expected(self, candidate: int) -> float:
        """The mean over sittings and processes."""
        often, much = self.slow.get(candidate, (0.0, 0.0))
        return self.truth[candidate] + often * much

    def process(self, chance: random.Random) -> dict[int, float]:
        """The times in one process."""
        return {c: value + chance.gauss(0, self.wanders[c]) for c, value in self.truth.items()}

    def sitting(self, process: Mapping[int, float], chance: random.Random) -> dict[int, float]:
        """The times in one sitting of a process."""
        found: dict[int, float] = {}
        for c, value in process.items():
            off = chance.gauss(0, _BETWEEN[self.kind])
            if self.kind in ("heavy", "all"):
                off /= math.sqrt(max(chance.gammavariate(1, 1), 0.05))
            often, much = self.slow.get(c, (0.0, 0.0))
            found[c] = value + off + (much if chance.random() < often else 0)
        return found


def a_key(kind: str, chance: random.Random) -> Key:
    """A default and one to seven others, near each other or far, some of them in a cluster."""
    count, spread = chance.randint(2, 8), chance.choice((0.002, 0.02, 0.06, 0.12))
    truth = {0: 0.0, **{c: chance.uniform(-spread, spread) for c in range(1, count)}}
    if chance.random() < 0.3:
        middle = -chance.uniform(0, spread)
        truth |= {c: middle + chance.gauss(0, 0.0015) for c in range(1, count) if chance.random() < 0.6}
    slow, wanders = {}, dict.fromkeys(truth, 0.0)
    if kind in ("two-state", "all"):
        slow = {c: (chance.random(), chance.uniform(0.01, 0.12)) for c in truth if chance.random() < 0.1}
    if kind in ("process", "all"):
        wanders = {c: abs(chance.gauss(0, 0.002)) + (0.03 if chance.random() < 0.03 else 0) for c in truth}
    return Key(kind, truth, slow, wanders)


def rounds_of(times: Mapping[int, float], count: int, noise: float, chance: random.Random) -> list[Round]:
    """Rounds of one sitting, with common drift and one outlier in twenty."""
    found: list[Round] = []
    for _ in range(count):
        drift = chance.gauss(0, 0.02)
        found.append(
            {
                c: [value + drift + chance.gauss(0, noise) * (5 if chance.random() < 0.05 else 1)]
                for c, value in times.items()
            }
        )
    return found


def decide(key: Key, chance: random.Random, noise: float = ROUND, processes: int = 1) -> int:
    """A whole judgement as a hearing makes it: sittings go round the processes, with who is in the running."""
    places = [key.process(chance) for _ in range(processes)]
    times = key.sitting(places[0], chance)
    quick = rounds_of(times, 3, noise, chance)
    alive = rule.leading({c: math.exp(min(one[c][0] for one in quick)) for c in times}, processes)
    count = rule.FIRST_OF_TWO if processes > 1 else rule.FIRST
    sittings, seats = [rounds_of({c: times[c] for c in alive}, count, noise, chance)], [0]
    while len(sittings) < rule.MOST_SITTINGS:
        if len(sittings) == rule.first_sittings(processes):
            alive = rule.contenders(sittings, processes)
        if alive == [0]:
            return 0
        seats.append(len(sittings) % processes)
        times = key.sitting(places[seats[-1]], chance)
        sittings.append(rounds_of({c: times[c] for c in alive}, rule.SITTING, noise, chance))
        if len(sittings) >= rule.LEAST_SITTINGS:
            verdict = rule.settle(sittings, seats)
            if verdict.clear:
                break
            alive = [c for c in alive if c not in verdict.drop]
    return rule.settle(sittings, seats).chosen


@dataclass(frozen=True)
class Score:
    """Parts of all keys that two tunes decided differently, and differently with choices over 1 % apart; how far apart
    at most; parts that are over 1 % slower than the default in a fresh process; what was gained, and could be.
    """

    flips: float
    far: float
    furthest: float
    worse: float
    gained: float
    best: float

    def __str__(self) -> str:
        return (
            f"{self.flips:.1%} differ, {self.far:.1%} by more than 1 % ({self.furthest:.1%} at most); "
            f"{self.worse:.1%} slower; gain {self.gained:.2%} of {self.best:.2%}"
        )


def score(kind: str, keys: int, seed: int = 1, processes: int = 1) -> Score:
    """Two tunes of `keys` keys, each judged in `processes` processes."""
    chance = random.Random(seed)  # noqa: S311 - a simulation
    apart: list[float] = []
    worse, gained, best = 0, 0.0, 0.0
    for _ in range(keys):
        key = a_key(kind, chance)
        one, other = (decide(key, random.Random(chance.random()), processes=processes) for _ in range(2))  # noqa: S311
        if one != other:
            apart.append(abs(key.expected(one) - key.expected(other)))
        fresh = key.sitting(key.process(chance), chance)
        worse += fresh[one] - fresh[0] > 0.01
        gained += key.expected(0) - key.expected(one)
        best += key.expected(0) - min(key.expected(c) for c in key.truth)
    far = sum(distance > 0.01 for distance in apart)
    return Score(len(apart) / keys, far / keys, max(apart, default=0.0), worse / keys, gained / keys, best / keys)


def main() -> None:
    """Say a row for each kind."""
    keys = int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 300
    for kind in KINDS:
        for processes in (1, 4):
            say(f"simulated, {keys} keys, {processes} processes, noise: {kind}", score(kind, keys, processes=processes))


if __name__ == "__main__":
    main()
