"""The decision rule of judging: which tactic to bake, given times measured side by side. Standard library only.

Every round measures each candidate that is still in the running once, so a round's times belong together: clock,
temperature and memory are the same for all. A sitting is a number of rounds with all tensors in the same place; many
kernels are faster in one place than in another, so what decides is the scatter between sittings, not between rounds.
And some are faster in one process than in another: where sittings were in several, the scatter between those counts
where it is the larger.

    first sittings  find who is in the running: the default and the few nearest to the fastest. Where there are several
                    processes they are two, in two of them: what is slow in one may be fast in all the others
    further ones    with those alone, until the comparison that decides is clear, or no more may be had

    best        the fastest candidate
    tied        those that cannot be told from the best, and those within a cut of it. The cut lies where it decides
                least: in the widest gap between the candidates, between LOW and HIGH above the best
    chosen      the first of the tied, in the fixed order: the default, then the runners and tactics as they are
                offered; the default where the chosen one is not surely faster

So two runs differ only where a gap is as narrow as the noise of many sittings, and then by about HIGH at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

LOW, HIGH = 0.003, 0.010  # relative to the best: below is always a tie, above never
WORSE_ANYWHERE = 0.005  # a candidate this much slower than the default at one token count is never chosen
CLEAR = 3.0  # standard errors that make a difference clear, between rounds of one sitting
TRIM = 0.2  # part of the rounds left out at each end
FIRST, FIRST_OF_TWO = (
    16,
    8,
)  # rounds of the first sitting: where it is the only one, and where another process has one too
WITHIN, WITHIN_OF_TWO, LEADERS = 0.04, 0.10, 8  # how near to the fastest a candidate must be to come to those; how many
NEAR, CONTENDERS = 0.02, 4  # how near to the fastest one must be there to come to the others; how many
SITTING = 8  # rounds of a further sitting
LEAST_SITTINGS, MOST_SITTINGS = 4, 12  # with the first ones
APART, SURE = 2.5, 2.0  # standard errors between sittings: to tell from the cut; to be surely faster than the default
MAYBE = 0.005  # slower than the default in the first sittings by no more, a candidate may be faster in other processes
STEADY = 0.001  # what one sitting scatters by at least, relative: a few may agree by chance
_SEVERAL = 3  # processes, from which on the scatter between them says something

Round = Mapping[int, Sequence[float]]  # candidate → ln(milliseconds) at each token count; 0 is the default


@dataclass(frozen=True)
class Verdict:
    """What the rounds so far say.

    `chosen` is a candidate, `drop` those that need no more rounds, `clear` says that more rounds would change
    nothing. `ratio` is the chosen time over the default's, `spread` the half width of its confidence interval.
    """

    chosen: int
    best: int
    clear: bool
    drop: tuple[int, ...]
    ratio: float
    spread: float
    decided_by: str


UNTRIED = Verdict(0, 0, clear=False, drop=(), ratio=1.0, spread=0.0, decided_by="default")  # nothing was timed


def centre(values: Sequence[float]) -> tuple[float, float]:
    """The trimmed mean, and its standard error from the winsorized variance (infinite below four values)."""
    n = len(values)
    cut = int(n * TRIM)
    ordered = sorted(values)
    kept = ordered[cut : n - cut]
    mean = math.fsum(kept) / len(kept)
    if n < 4:
        return mean, math.inf
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = math.fsum(winsorized) / n
    variance = math.fsum((value - middle) ** 2 for value in winsorized) / (n - 1)
    return mean, math.sqrt(variance / n) / (1 - 2 * cut / n)


def first_sittings(processes: int) -> int:
    """How many sittings find who is in the running."""
    return 2 if processes > 1 else 1


def contenders(sittings: Sequence[Sequence[Round]], processes: int = 1) -> list[int]:
    """Who comes to the further sittings after the first ones: the default, and the few that are near the fastest.

    The default alone where nothing seems faster, or with several processes to sit in, where nothing is near it. What is
    slower than the default at one of the token counts is left out if it was so in each of them.
    """

    def slow(c: int) -> bool:
        return all(_slow_somewhere(rounds, c) for rounds in sittings)

    running = [c for c in sittings[-1][-1] if c == 0 or not slow(c)]
    score = {c: math.fsum(centre(_ratios(rounds, c, 0))[0] for rounds in sittings) / len(sittings) for c in running}
    best = min(score.values())
    others = [value for c, value in score.items() if c]
    if min(others, default=math.inf) > (MAYBE if processes > 1 else -STEADY):
        return [0]
    near = sorted((c for c in score if c and score[c] <= best + NEAR), key=lambda c: (score[c], c))
    return sorted({0, *near[:CONTENDERS]})


def settle(sittings: Sequence[Sequence[Round]], seats: Sequence[int] = ()) -> Verdict:
    """Decide from several sittings. Candidates of the last one are in the running.

    `seats` names the process of each sitting, where there was more than one. Where the chosen one is not surely faster
    than the default, the default is chosen.
    """
    rounds = [one for sitting in sittings for one in sitting]
    alive = [c for c in sorted(sittings[-1][-1]) if c == 0 or not _slow_somewhere(rounds, c)]
    means = [{c: centre(_ratios(sitting, c, 0))[0] for c in alive} for sitting in sittings]
    by_process = _by_process(means, seats)
    score = {c: math.fsum(one[c] for one in by_process) / len(by_process) for c in alive}
    best = min(alive, key=lambda c: (score[c], c))

    def scatter(mine: int, other: int) -> float:
        apart = _scatter(by_process, mine, other) if _SEVERAL <= len(by_process) < len(means) else 0.0
        return max(apart, _scatter(means, mine, other))

    behind = {c: (score[c] - score[best], scatter(c, best)) for c in alive}
    chosen, told = _first_tied(behind, APART)
    clear = all(told[c] for c in alive if c <= chosen)
    if chosen:
        error = SURE * scatter(chosen, 0)
        if score[chosen] + error > 0:
            chosen, clear = 0, score[chosen] - error > -LOW
    drop = tuple(c for c, (distance, error) in behind.items() if c and distance - APART * error > HIGH)
    spread = SURE * scatter(chosen, 0) if chosen else 0.0
    return Verdict(chosen, best, clear, drop, math.exp(score[chosen]), spread, _why(chosen, best))


def _by_process(means: Sequence[Mapping[int, float]], seats: Sequence[int]) -> list[Mapping[int, float]]:
    """The mean of each process's sittings; every sitting by itself where there is one process."""
    if len(set(seats[: len(means)])) < _SEVERAL:
        return list(means)
    found: dict[int, list[Mapping[int, float]]] = {}
    for seat, one in zip(seats, means, strict=False):
        found.setdefault(seat, []).append(one)
    return [{c: math.fsum(one[c] for one in same) / len(same) for c in same[0]} for same in found.values()]


def _scatter(means: Sequence[Mapping[int, float]], mine: int, other: int) -> float:
    """The standard error of the mean difference of two candidates, from how it scatters between sittings."""
    if mine == other:
        return 0.0
    values = [one[mine] - one[other] for one in means]
    middle = math.fsum(values) / len(values)
    if len(values) < 2:
        return math.inf
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
    return max(deviation, STEADY) / math.sqrt(len(values))


def _first_tied(behind: Mapping[int, tuple[float, float]], errors: float) -> tuple[int, dict[int, bool]]:
    """The first of those tied with the best, and of which candidates it is told on which side of the cut they are.

    `behind` holds each candidate's distance from the best and its standard error.
    """
    cut = _cut(sorted(max(0.0, distance) for distance, _ in behind.values()))
    told = {c: abs(distance - cut) > errors * error for c, (distance, error) in behind.items()}
    return min(c for c, (distance, _) in behind.items() if distance <= (cut if told[c] else HIGH)), told


def _why(chosen: int, best: int) -> str:
    return "default" if chosen == best == 0 else "faster" if chosen == best else "tie"


def leading(screened: Mapping[int, float], processes: int = 1) -> list[int]:
    """The candidates worth judging, by quick times in milliseconds: the default, and those near the fastest."""
    within = WITHIN_OF_TWO if processes > 1 else WITHIN
    fastest = min(screened.values())
    near = sorted((c for c in screened if c and screened[c] <= fastest * (1 + within)), key=lambda c: (screened[c], c))
    return sorted({0, *near[:LEADERS]})


def _ratios(rounds: Sequence[Round], mine: int, other: int) -> list[float]:
    """ln(mine / other), the mean over the token counts, for each round that measured both."""
    return [
        math.fsum(a - b for a, b in zip(one[mine], one[other], strict=True)) / len(one[mine])
        for one in rounds
        if mine in one and other in one
    ]


def _slow_somewhere(rounds: Sequence[Round], candidate: int) -> bool:
    """Whether a candidate is clearly slower than the default at one of the token counts."""
    counts = len(rounds[-1][candidate])
    for point in range(counts if counts > 1 else 0):
        ratio, error = centre([one[candidate][point] - one[0][point] for one in rounds if candidate in one])
        if ratio - CLEAR * error > 0 and ratio > WORSE_ANYWHERE:
            return True
    return False


def _cut(distances: Sequence[float]) -> float:
    """The middle of the widest gap between sorted distances from the best, looked for between LOW and HIGH."""
    inside = [LOW, *(d for d in distances if LOW < d < HIGH), HIGH]
    low, high = max(pairwise(inside), key=lambda gap: (gap[1] - gap[0], -gap[0]))
    return (low + high) / 2
