"""The decision rule of judging: which tactic to bake, given times measured side by side. Standard library only.

Every round measures each candidate that is still in the running once, so a round's times belong together: clock,
temperature and memory are the same for all. Candidates are compared by the trimmed mean of their paired logarithmic
ratios, and measuring goes on until the comparison that decides is clear. What stays unclear is a tie.

    best        the fastest candidate
    tied        those that cannot be told from the best, and those within a cut of it. The cut lies where it decides
                least: in the widest gap between the candidates, between LOW and HIGH above the best
    chosen      the first of the tied, in the fixed order: the default, then the runners and tactics as they are offered

So two runs differ only where a gap is as narrow as the noise of many rounds, and then by about HIGH at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

LOW, HIGH = 0.003, 0.010  # relative to the best: below is always a tie, above never
WORSE_ANYWHERE = 0.005  # a candidate this much slower than the default at one token count is never chosen
CLEAR = 3.0  # standard errors that make a difference clear
TRIM = 0.2  # part of the rounds left out at each end
BATCH = 8  # rounds between two looks
LEAST, MOST = 32, 480  # rounds of one key in its first sitting
SITTING = 24  # rounds of a further one
MOSTLY = 0.85  # of all batches must be won against the default

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


def settle(sittings: Sequence[Sequence[Round]]) -> Verdict:
    """Decide from several sittings; in the later ones the default and the choice lay in other memory.

    What is chosen over the default must be faster in every sitting, and in most batches of rounds.
    """
    rounds = [one for sitting in sittings for one in sitting]
    without: set[int] = set()
    while True:
        verdict = judge(rounds, without)
        if verdict.chosen == 0 or confirmed(verdict.chosen, sittings):
            return verdict
        without.add(verdict.chosen)


def confirmed(candidate: int, sittings: Sequence[Sequence[Round]]) -> bool:
    """Whether a candidate beats the default in each sitting, and in MOSTLY of all batches of rounds.

    A kernel that is fast in one state of the GPU and slow in another can win on average and lose for a while.
    """
    ratios = [_ratios(sitting, candidate, 0) for sitting in sittings]
    batches = [math.fsum(one[at : at + BATCH]) for one in ratios for at in range(0, len(one) - BATCH + 1, BATCH)]
    faster = sum(batch < 0 for batch in batches)
    return faster >= MOSTLY * len(batches) and all(centre(one)[0] < -LOW for one in ratios)


def judge(rounds: Sequence[Round], without: Collection[int] = ()) -> Verdict:
    """Decide from the rounds so far. Candidates of the last round are in the running, except those in `without`;
    0, the default, always is.
    """
    alive = [c for c in sorted(rounds[-1]) if c not in without]
    score = {c: centre(_ratios(rounds, c, 0))[0] for c in alive}
    barred = {c for c in alive if c != 0 and _slow_somewhere(rounds, c)}
    running = [c for c in alive if c not in barred]
    best = min(running, key=lambda c: (score[c], c))
    behind = {c: centre(_ratios(rounds, c, best)) if c != best else (0.0, 0.0) for c in running}
    cut = _cut(sorted(max(0.0, distance) for distance, _ in behind.values()))
    told = {c: abs(distance - cut) > CLEAR * error for c, (distance, error) in behind.items()}
    tied = {c for c, (distance, _) in behind.items() if distance <= (cut if told[c] else HIGH)}
    chosen = min(tied)
    ratio, error = centre(_ratios(rounds, chosen, 0)) if chosen else (0.0, 0.0)
    # Only candidates that come before the chosen one in the fixed order, and the chosen one, decide.
    clear = all(told[c] for c in running if c <= chosen)
    drop = {c for c, (distance, error) in behind.items() if c and distance - CLEAR * error > HIGH} | {
        c for c in barred if len(rounds) >= LEAST
    }
    why = "default" if chosen == best == 0 else "faster" if chosen == best else "tie"
    return Verdict(chosen, best, clear, tuple(sorted(drop)), math.exp(ratio), CLEAR * error, why)


def leading(screened: Mapping[int, float], within: float, most: int) -> list[int]:
    """The candidates worth judging, by quick times: the default, and those within a factor of the fastest."""
    fastest = min(screened.values())
    near = sorted((c for c in screened if c and screened[c] <= fastest * (1 + within)), key=lambda c: (screened[c], c))
    return sorted({0, *near[:most]})


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
