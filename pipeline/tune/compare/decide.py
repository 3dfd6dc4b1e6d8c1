"""Which tactic to keep, given times measured side by side. Standard library only.

    best      the fastest candidate that is at no token count slower than the default by more than WORSE
    chosen    the first candidate within TIE of the best: the default, then the tactics in the order they are offered
    default   unless the chosen one is faster by SURE standard errors

A batch is some rounds with all tensors in one place in one process. Kernels are faster in one place, and in one
process, than in another, so the scatter between batches decides, not the one between rounds. Measured on an H200 with
Llama-3.1-8B (docs/explanation/measurements.md): two tunes agree on 95 to 99 % of entries, and no choice was
worse than the default by more than 1 % at a tuned count. One process alone chose an entry that was 1.7 % worse in
others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIE = 0.007  # relative to the best: a tie
WORSE = 0.005  # a candidate this much slower than the default at one token count is never chosen
SURE = 2.0  # standard errors by which a choice must beat the default
STEADY = 0.001  # what batches scatter by at least: a few may agree by chance
CANDIDATES = 4  # FlashInfer's fastest that are compared with the default
ROUNDS = 8  # of each candidate in each process
SECONDS = 1.0  # bound of all comparing, times ops times buckets, where nothing else is asked for

Round = Mapping[
    int, Sequence[float]
]  # candidate → ln(milliseconds) at each token count and clock state; 0: the default
Batch = Sequence[Round]
Key = tuple[int, int, int]  # the op's index in the plan, the bucket, and which of the entries that answer there


@dataclass(frozen=True)
class Choice:
    """The chosen candidate; its time over the default's, and the half width of that ratio's confidence interval."""

    chosen: int
    ratio: float
    spread: float
    decided_by: str  # `default`, `faster` (the best), `tie` (the first of those near the best)


KEEP_DEFAULT = Choice(0, 1.0, 0.0, "default")


def decide(processes: Sequence[Sequence[Batch]]) -> Choice:
    """Decide from the batches of each process. Candidates that lack times in one of them are left out."""
    batches = [batch for process in processes for batch in process]
    alive = sorted(set.intersection(*(set(batch[0]) for batch in batches)))
    ratios = {c: [_mean_ratio(batch, c) for batch in batches] for c in alive}
    score = {c: statistics.fmean(ratios[c]) for c in alive}
    able = [c for c in alive if c == 0 or _worst_point(processes, c) <= WORSE]
    best = min(able, key=lambda c: (score[c], c))
    chosen = next(c for c in able if score[c] <= score[best] + TIE)
    if not chosen:
        return KEEP_DEFAULT
    scatter = statistics.stdev(ratios[chosen]) if len(batches) > 1 else 1.0
    error = SURE * max(scatter, STEADY) / math.sqrt(len(batches))
    if score[chosen] + error > 0:
        return KEEP_DEFAULT
    return Choice(chosen, math.exp(score[chosen]), error, "faster" if chosen == best else "tie")


def _mean_ratio(batch: Batch, candidate: int) -> float:
    """ln(candidate / default): the mean over token counts and clock states, and over rounds without the extremes."""
    return trimmed([statistics.fmean(a - b for a, b in zip(r[candidate], r[0], strict=True)) for r in batch])


def _worst_point(processes: Sequence[Sequence[Batch]], candidate: int) -> float:
    """The largest ln(candidate / default) of any token count or clock state: the mean over the processes."""
    found: list[list[float]] = []
    for process in processes:
        rounds = [one for batch in process for one in batch]
        points = range(len(rounds[0][0]))
        found.append([trimmed([one[candidate][p] - one[0][p] for one in rounds]) for p in points])
    return max(statistics.fmean(point) for point in zip(*found, strict=True))


def trimmed(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest fifth."""
    cut = len(values) // 5
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@dataclass
class Budget:
    """The bound of all comparing of a run, in seconds; what is left when it is used up keeps the default."""

    seconds: float
    spent: float = 0.0
    short: int = 0

    def note(self) -> str:
        """In words, where something was left."""
        if not self.short:
            return ""
        return (
            f"{self.short} entries keep the default: comparing had a limit of {self.seconds:.1f} s (--compare-budget)"
        )
