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
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from .decide import Round

BOTH_FROM = 128  # tokens; below, reading the weights takes the time, and the limit is not met (seen up to 64)
COOL = 0.1  # seconds in which a loaded GPU comes back to its highest clock
BURST, PAUSE = 25.0, 1.5  # ms of work at a time, and the pause after it in bursts: 40 % of the time at work
SETTLE = 120.0  # ms of load before the clock has settled

Mark = TypeVar("Mark")


class Stage(Protocol[Mark]):
    """The candidates of one entry, which can be launched one after the other without waiting."""

    @property
    def ms(self) -> Sequence[float]:
        """About what one sample of each point takes, in milliseconds."""

    def launch(self, candidate: int, point: int, turn: int) -> Mark:
        """Begin a sample, after all that were begun before."""

    def reach(self, candidate: int, mark: Mark) -> None:
        """Wait until this sample, and so all before it, has ended."""

    def wait(self) -> None:
        """Wait until nothing is left to do."""

    def read(self, mark: Mark) -> float:
        """ln(milliseconds) of one call in a sample that has ended."""


class _Timer(Generic[Mark]):
    """A round goes through all stages before the next begins, so that they share the state of the clock.

    Samples are waited for one by one, so that a stage can name the one that does not end.
    """

    def __init__(
        self, stages: Sequence[Stage[Mark]], alive: Sequence[Sequence[int]], sleep: Callable[[float], None]
    ) -> None:
        self._stages, self._alive, self._sleep = stages, alive, sleep
        self._points = [
            (number, point, ms * len(alive[number]))  # what a round takes at each point of each stage
            for number, stage in enumerate(stages)
            for point, ms in enumerate(stage.ms)
        ]
        self._begun: list[tuple[Stage[Mark], int, Mark]] = []

    def at_rest(self, count: int, *, cool: bool) -> list[list[Round]]:
        if cool:
            self._sleep(COOL)
        self._begin(0, 0, 0, 0)  # what meets an idle device is charged for its launch: not timed
        found: list[list[dict[int, list[Mark]]]] = []
        burst = 0.0
        for turn in range(count):
            marks = self._empty(turn)
            found.append(marks)
            for stage, point, takes in self._points:
                if cool and burst and burst + takes > BURST:
                    self._wait()
                    self._sleep(burst * PAUSE / 1e3)
                    self._begin(stage, 0, point, turn)
                    burst = 0.0
                self._launch(marks, stage, point, turn)
                burst += takes
        return self._read(found)

    def under_load(self, count: int) -> list[list[Round]]:
        settling = max(1, math.ceil(SETTLE / max(1e-3, sum(takes for _, _, takes in self._points))))
        found: list[list[dict[int, list[Mark]]]] = []
        for turn in range(settling + count):
            marks = self._empty(turn)
            found.append(marks)
            for stage, point, _ in self._points:
                self._launch(marks, stage, point, turn)
        return [rounds[settling:] for rounds in self._read(found)]

    def _empty(self, turn: int) -> list[dict[int, list[Mark]]]:
        return [{c: [] for c in (alive if turn % 2 == 0 else alive[::-1])} for alive in self._alive]

    def _launch(self, marks: Sequence[dict[int, list[Mark]]], stage: int, point: int, turn: int) -> None:
        for candidate, own in marks[stage].items():
            own.append(self._begin(stage, candidate, point, turn))

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

    def _read(self, marks: Sequence[Sequence[dict[int, list[Mark]]]]) -> list[list[Round]]:
        self._wait()
        return [
            [{c: tuple(map(stage.read, own)) for c, own in one[number].items()} for one in marks]
            for number, stage in enumerate(self._stages)
        ]


def time_rounds(
    stages: Sequence[Stage[Mark]],
    alive: Sequence[Sequence[int]],
    count: int,
    *,
    both: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[Round]]:
    """`count` rounds of each stage's candidates `alive`: all points at rest; where `both`, then all under load."""
    timer = _Timer(stages, alive, sleep)
    rested = timer.at_rest(count, cool=both)
    if not both:
        return rested
    loaded = timer.under_load(count)
    return [
        [{c: (*one[c], *other[c]) for c in one} for one, other in zip(mine, also, strict=True)]
        for mine, also in zip(rested, loaded, strict=True)
    ]
