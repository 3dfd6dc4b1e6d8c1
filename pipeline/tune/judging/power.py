"""At rest and under load: the two states of a GPU's clock in which tactics are timed.

A GPU that has rested runs at its highest clock. Under a load of large products it meets its power limit within 50 to
90 ms and goes on at three quarters of that clock (seen on an H200: 1980 MHz, then 1500 at 700 W). Tactics change
places between the two: a product of 3072 rows had one 1.9 % behind the default at rest and 2.6 % ahead of it under
load, each within 0.2 % in six processes on two GPUs. Times from anywhere between decide by chance. So every round is
timed in both, as if these were two token counts: what is slower than the default in one is not chosen.

    at rest       short bursts with pauses, so that the mean power stays far below the limit
    under load    the same candidates without a pause, timed from when the clock has settled

Cooling and settling take a fifth of a second, so several keys are timed in one go.
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

    def wake(self) -> None:
        """Until the device is awake: nothing that is timed is the first that it does for this process."""

    def queue(self, number: int, place: int, turn: int) -> Mark:
        """Begin a sample of a candidate at a point, after all that were begun before."""

    def reach(self, number: int, mark: Mark) -> None:
        """Until a sample of this candidate has ended, and with it all that were begun before."""

    def wait(self) -> None:
        """Until nothing is left to do."""

    def read(self, mark: Mark) -> float:
        """ln(milliseconds) of one call in a sample that has ended."""


Part = tuple[Stage[Mark], Sequence[int]]  # a key's stage, and which of its candidates are timed


class _Timer(Generic[Mark]):
    """Rounds on the stages of some keys; what is queued first meets an idle device and would be charged for its launch:
    not timed.

    A round goes through all keys before the next one begins, so that they share the state of the clock. Samples are
    waited for one by one, so that the stage can say which one it is that does not end; those that are not timed too,
    since a later one would be taken for them.
    """

    def __init__(self, parts: Sequence[Part[Mark]], sleep: Callable[[float], None]) -> None:
        self._parts, self._sleep = parts, sleep
        self._places = [
            (key, place, ms * len(alive))  # what a round takes at each point of each key
            for key, (stage, alive) in enumerate(parts)
            for place, ms in enumerate(stage.ms)
        ]
        self._begun: list[tuple[Stage[Mark], int, Mark]] = []  # since the last wait

    def at_rest(self, count: int, *, cool: bool) -> list[list[Round]]:
        """Rounds on a device that is never loaded for long where it must stay `cool`."""
        if cool:
            self._wait()
            self._sleep(COOL)
        self._begin(0, 0, 0, 0)
        marks: list[list[dict[int, list[Mark]]]] = []
        burst = 0.0
        for turn in range(count):
            marks.append(self._empty(turn))
            for key, place, takes in self._places:
                if cool and burst and burst + takes > BURST:
                    self._wait()
                    self._sleep(burst * PAUSE / 1e3)
                    self._begin(key, 0, place, turn)
                    burst = 0.0
                self._queue(marks[-1], key, place, turn)
                burst += takes
        return self._read(marks)

    def under_load(self, count: int) -> list[list[Round]]:
        """Rounds on a device that has been at work without a pause until its clock has settled."""
        settling = max(1, math.ceil(SETTLE / max(1e-3, sum(takes for _, _, takes in self._places))))
        marks: list[list[dict[int, list[Mark]]]] = []
        for turn in range(settling + count):
            marks.append(self._empty(turn))
            for key, place, _ in self._places:
                self._queue(marks[-1], key, place, turn)
        return [rounds[settling:] for rounds in self._read(marks)]

    def _empty(self, turn: int) -> list[dict[int, list[Mark]]]:
        """For each key its candidates, in the order of this turn."""
        return [{number: [] for number in (alive if turn % 2 == 0 else alive[::-1])} for _, alive in self._parts]

    def _queue(self, marks: Sequence[dict[int, list[Mark]]], key: int, place: int, turn: int) -> None:
        for number, own in marks[key].items():
            own.append(self._begin(key, number, place, turn))

    def _begin(self, key: int, number: int, place: int, turn: int) -> Mark:
        stage = self._parts[key][0]
        mark = stage.queue(number, place, turn)
        self._begun.append((stage, number, mark))
        return mark

    def _wait(self) -> None:
        for stage, number, mark in self._begun:
            stage.reach(number, mark)
        self._begun.clear()
        for stage, _ in self._parts:
            stage.wait()

    def _read(self, marks: Sequence[Sequence[dict[int, list[Mark]]]]) -> list[list[Round]]:
        """The rounds of each key."""
        self._wait()
        return [
            [{number: tuple(map(stage.read, own)) for number, own in one[key].items()} for one in marks]
            for key, (stage, _) in enumerate(self._parts)
        ]


def rounds(
    parts: Sequence[Part[Mark]], count: int, *, both: bool, sleep: Callable[[float], None] = time.sleep
) -> list[list[Round]]:
    """`count` rounds of each key's candidates: all points at rest; where `both`, then all points under load."""
    parts[0][0].wake()
    timer = _Timer(parts, sleep)
    rested = timer.at_rest(count, cool=both)
    if not both:
        return rested
    loaded = timer.under_load(count)
    return [
        [{n: (*one[n], *other[n]) for n in one} for one, other in zip(mine, also, strict=True)]
        for mine, also in zip(rested, loaded, strict=True)
    ]


def both_states(bucket: int) -> bool:
    """Whether an entry of so many tokens is timed in both states; alike on all ranks, whose times are put together."""
    return bucket >= BOTH_FROM
