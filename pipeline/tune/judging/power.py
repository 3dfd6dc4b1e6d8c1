"""At rest and under load: the two states of a GPU's clock in which tactics are timed.

A GPU that has rested runs at its highest clock. Under a load of large products it meets its power limit within 50 to
90 ms and goes on at three quarters of that clock (seen on an H200: 1980 MHz, then 1500 at 700 W). Tactics change
places between the two: a product of 3072 rows had one 1.9 % behind the default at rest and 2.6 % ahead of it under
load, each within 0.2 % in six processes on two GPUs. Times from anywhere between decide by chance. So every round is
timed in both, as if these were two token counts: what is slower than the default in one is not chosen.

    at rest       short bursts with pauses, so that the mean power stays far below the limit
    under load    the same candidates without a pause, timed from when the clock has settled
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from .rule import Round

BOTH_FROM = 128  # tokens; below, reading the weights takes the time, and the limit is not met (seen up to 64)
COOL = 0.1  # seconds in which a loaded GPU comes back to its highest clock, beside the building of graphs
BURST, PAUSE = 25.0, 1.5  # ms of work at a time, and the pause after it in bursts: 40 % of the time at work
SETTLE = 120.0  # ms of load before the clock has settled

Mark = TypeVar("Mark")


class Stage(Protocol[Mark]):
    """What times samples."""

    @property
    def ms(self) -> Sequence[float]:
        """About what one sample of each point takes, in milliseconds."""

    def queue(self, number: int, place: int, turn: int) -> Mark:
        """Begin a sample of a candidate at a point, after all that were begun before."""

    def reach(self, number: int, mark: Mark) -> None:
        """Until a sample of this candidate has ended, and with it all that were begun before."""

    def wait(self) -> None:
        """Until nothing is left to do."""

    def read(self, mark: Mark) -> float:
        """ln(milliseconds) of one call in a sample that has ended."""


class _Timer(Generic[Mark]):
    """Rounds on a stage; what is queued first meets an idle device and would be charged for its launch: not timed.

    Samples are waited for one by one, so that the stage can say which one it is that does not end; those that are not
    timed too, since a later one would be taken for them.
    """

    def __init__(self, stage: Stage[Mark], alive: Sequence[int], sleep: Callable[[float], None]) -> None:
        self._stage, self._alive, self._sleep = stage, alive, sleep
        self._points = [ms * len(alive) for ms in stage.ms]  # what a round takes at each point
        self._begun: list[tuple[int, Mark]] = []  # since the last wait

    def at_rest(self, count: int, *, cool: bool) -> list[Round]:
        """Rounds on a device that is never loaded for long where it must stay `cool`."""
        if cool:
            self._wait()
            self._sleep(COOL)
        self._begin(0, 0, 0)
        marks: list[dict[int, list[Mark]]] = []
        burst = 0.0
        for turn in range(count):
            marks.append({number: [] for number in self._order(turn)})
            for place, takes in enumerate(self._points):
                if cool and burst and burst + takes > BURST:
                    self._wait()
                    self._sleep(burst * PAUSE / 1e3)
                    self._begin(0, place, turn)
                    burst = 0.0
                self._queue(marks[-1], place, turn)
                burst += takes
        return self._read(marks)

    def under_load(self, count: int) -> list[Round]:
        """Rounds on a device that has been at work without a pause until its clock has settled."""
        settling = max(1, math.ceil(SETTLE / max(1e-3, sum(self._points))))
        marks: list[dict[int, list[Mark]]] = []
        for turn in range(settling + count):
            marks.append({number: [] for number in self._order(turn)})
            for place in range(len(self._points)):
                self._queue(marks[-1], place, turn)
        return self._read(marks)[settling:]

    def _order(self, turn: int) -> Sequence[int]:
        return self._alive if turn % 2 == 0 else self._alive[::-1]

    def _queue(self, marks: dict[int, list[Mark]], place: int, turn: int) -> None:
        for number, own in marks.items():
            own.append(self._begin(number, place, turn))

    def _begin(self, number: int, place: int, turn: int) -> Mark:
        mark = self._stage.queue(number, place, turn)
        self._begun.append((number, mark))
        return mark

    def _wait(self) -> None:
        for number, mark in self._begun:
            self._stage.reach(number, mark)
        self._begun.clear()
        self._stage.wait()

    def _read(self, marks: Sequence[dict[int, list[Mark]]]) -> list[Round]:
        self._wait()
        return [{number: tuple(map(self._stage.read, own)) for number, own in one.items()} for one in marks]


def rounds(
    stage: Stage[Mark], alive: Sequence[int], count: int, *, both: bool, sleep: Callable[[float], None] = time.sleep
) -> list[Round]:
    """`count` rounds of the candidates `alive`: all points at rest; where `both`, then all points under load."""
    timer = _Timer(stage, alive, sleep)
    rested = timer.at_rest(count, cool=both)
    if not both:
        return rested
    loaded = timer.under_load(count)
    return [{n: (*one[n], *other[n]) for n in one} for one, other in zip(rested, loaded, strict=True)]


def both_states(bucket: int) -> bool:
    """Whether an entry of so many tokens is timed in both states; alike on all ranks, whose times are put together."""
    return bucket >= BOTH_FROM
