"""How long judging may take: a bound of the whole, shared out so that no bucket takes what others need.

The bound is hard but for one step: nothing is begun that, by what the last such step took, would not fit. What is
still undecided then is settled by rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Per bucket of an op, where nothing is asked for: a GPU's clock has to be waited for.
GPU_SECONDS, CPU_SECONDS = 2.0, 1.0
_SHARE = 4.0  # one bucket may take this many times the average, while the total lasts
_RESERVE = 0.5  # of the average is kept for each bucket that is still to come


def seconds_per_bucket(device: str) -> float:
    """The bound for `cuda` or `cpu` that holds unless another is asked for."""
    return GPU_SECONDS if device == "cuda" else CPU_SECONDS


@dataclass
class Budget:
    """Seconds. `building` is what making the bench of one key took last, `undecided` counts the keys that were settled
    by rule for want of time, of all that were `judged`: one for each bucket, or several, as of a MoE layer in two
    products. `done` counts the buckets.
    """

    per_bucket: float
    buckets: int
    spent: float = 0.0
    done: int = 0
    judged: int = 0
    undecided: int = 0
    building: float = 0.0

    @property
    def total(self) -> float:
        """The bound of the whole judging."""
        return self.per_bucket * self.buckets

    def allow(self, buckets: int = 1) -> float:
        """What the next buckets may take together, so that every later one still gets its reserve; nothing where
        nothing is left.
        """
        reserve = _RESERVE * self.per_bucket * max(0, self.buckets - self.done - buckets)
        return max(0.0, min(_SHARE * self.per_bucket * buckets, self.total - self.spent - reserve))

    def take(self, seconds: float, buckets: int = 1, *, short: Sequence[bool] = (False,)) -> None:
        """Note what some buckets took together, and of each of their keys whether there was no time to decide it."""
        self.spent += seconds
        self.done += buckets
        self.judged += len(short)
        self.undecided += sum(short)

    def told(self) -> str:
        """In words, where something was left undecided."""
        if not self.undecided:
            return ""
        return (
            f"judging: {self.undecided} of {self.judged} keys undecided within their share of {self.total:.1f} s, "
            f"of which {self.spent:.1f} s were used; settled by rule (--judge-budget)"
        )


@dataclass
class Turn:
    """Some keys before the judge: what they took on the slowest rank, and what they may on the one that may least.

    `round_seconds` is what one candidate took in one round last.
    """

    began: float
    elapsed: float = 0.0
    allowed: float = math.inf
    round_seconds: float = 0.0

    def fits(self, seconds: float) -> bool:
        """Whether a step of so many seconds fits into what is allowed."""
        return self.elapsed + seconds <= self.allowed
