"""At rest and under load: the two states of a GPU's clock in which tactics are timed.

A GPU that has rested runs at its highest clock. Under a load of large products it meets its power limit within 50 to
90 ms and goes on at three quarters of that clock (seen on an H200: 1980 MHz, then 1500 at 700 W). Tactics change
places between the two: a product of 3072 rows had one 1.9 % behind the default at rest and 2.6 % ahead of it under
load. Times from anywhere between decide by chance, so every round is timed in both, as if these were two token counts.

    at rest       short bursts with pauses, so that the mean power stays far below the limit
    under load    the same candidates without a pause, timed from when the clock has settled

Cooling and settling take a fifth of a second, so several entries are timed in one go.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from .decide import Round

BOTH_FROM = 128  # tokens; below, reading the weights takes the time, and the limit is not met (seen up to 64)
COOL = 0.1  # seconds in which a loaded GPU comes back to its highest clock
BURST, PAUSE = 25.0, 1.5  # ms of work at a time, and the pause after it in bursts: 40 % of the time at work
SETTLE = 120.0  # ms of load before the clock has settled

Mark: TypeAlias = Any  # a sample that was begun


class Stage(Protocol):
    """The candidates of one entry, which can be launched one after the other without waiting."""

    ms: Sequence[float]  # about what one sample of each point takes, in milliseconds

    @abstractmethod
    def launch(self, candidate: int, point: int, turn: int) -> Mark:
        """Begin a sample, after all that were begun before."""

    @abstractmethod
    def reach(self, candidate: int, mark: Mark) -> None:
        """Wait until this sample, and so all before it, has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until nothing is left to do."""

    @abstractmethod
    def read(self, mark: Mark) -> float:
        """ln(milliseconds) of one call in a sample that has ended."""


def time_rounds(
    stages: Sequence[Stage],
    alive: Sequence[Sequence[int]],
    count: int,
    *,
    both: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[Round]]:
    """`count` rounds of each stage's candidates `alive`: all points at rest; where `both`, then all under load."""
    timer = _Timer(stages, alive, sleep)
    rested = timer.rounds(count, pauses=both)
    if not both:
        return rested
    settling = max(1, math.ceil(SETTLE / max(1e-3, sum(takes for _, _, takes in timer.points))))
    loaded = timer.rounds(settling + count, pauses=False)
    return [
        [{c: (*one[c], *other[c]) for c in one} for one, other in zip(mine, also[settling:], strict=True)]
        for mine, also in zip(rested, loaded, strict=True)
    ]


class _Timer:
    """A round goes through all stages before the next begins, so that they share the state of the clock.

    Samples are waited for one by one, so that a stage can name the one that does not end.
    """

    def __init__(self, stages: Sequence[Stage], alive: Sequence[Sequence[int]], sleep: Callable[[float], None]) -> None:
        self._stages, self._alive, self._sleep = stages, alive, sleep
        self.points = [
            (number, point, ms * len(alive[number]))  # what a round takes at each point of each stage
            for number, stage in enumerate(stages)
            for point, ms in enumerate(stage.ms)
        ]
        self._begun: list[tuple[Stage, int, Mark]] = []

    def rounds(self, count: int, *, pauses: bool) -> list[list[Round]]:
        """Rounds of each stage, forwards and backwards in turn; `pauses` keep the GPU at rest."""
        if pauses:
            self._sleep(COOL)
        self._begin(0, 0, 0, 0)  # what meets an idle device is charged for its launch: not timed
        marks: list[list[dict[int, list[Mark]]]] = []
        burst = 0.0
        for turn in range(count):
            marks.append([{c: [] for c in (alive if turn % 2 == 0 else alive[::-1])} for alive in self._alive])
            for stage, point, takes in self.points:
                if pauses and burst and burst + takes > BURST:
                    self._wait()
                    self._sleep(burst * PAUSE / 1e3)
                    self._begin(stage, 0, point, turn)
                    burst = 0.0
                for candidate, own in marks[-1][stage].items():
                    own.append(self._begin(stage, candidate, point, turn))
                burst += takes
        self._wait()
        return [
            [{c: tuple(map(stage.read, own)) for c, own in one[number].items()} for one in marks]
            for number, stage in enumerate(self._stages)
        ]

    def _begin(self, stage: int, candidate: int, point: int, turn: int) -> Mark:
        mark = self._stages[stage].launch(candidate, point, turn)
        self._begun.append((self._stages[stage], candidate, mark))
        return mark

    def _wait(self) -> None:
        for stage, candidate, mark in self._begun:
            stage.reach(candidate, mark)
        self._begun.clear()
        for stage in self._stages:
            stage.wait()
