"""Rounds at rest never meet the power limit, rounds under load all do: held against a simulated GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from pipeline.tune.compare import clock

LIMIT, IDLE, BUSY = 700.0, 125.0, 870.0  # watts
WINDOW = 75.0  # ms over which the simulated limiter averages


class Hung(Exception):
    """Where a process would stand for ever."""


@dataclass
class Gpu:
    """A stage whose clock falls when the mean power of the last `WINDOW` ms is above the limit.

    Candidate 1 is slower than the default at rest and faster under load. Samples take `ms` at rest.
    """

    ms: Sequence[float]
    now: float = 0.0
    work: list[tuple[float, float]] = field(default_factory=list)  # from, to
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    hangs: float = math.inf  # the sample that does not end, from 0

    def limited(self) -> bool:
        since = self.now - WINDOW
        busy = sum(max(0.0, end - max(begin, since)) for begin, end in self.work)
        return (busy * BUSY + (WINDOW - busy) * IDLE) / WINDOW > LIMIT

    def launch(self, number: int, place: int, turn: int) -> float:
        self.asked.append((number, place, turn))
        limited = self.limited()
        factor = (1.3 * (0.97 if number else 1.0)) if limited else (1.02 if number else 1.0)
        begin, self.now = self.now, self.now + self.ms[place] * factor
        self.work.append((begin, self.now))
        return factor

    def reach(self, number: int, mark: float) -> None:
        self.reached.append(number)
        if len(self.reached) > self.hangs:
            raise Hung

    def wait(self) -> None:
        assert len(self.reached) == len(self.asked)

    def read(self, mark: float) -> float:
        return math.log(mark)

    def sleep(self, seconds: float) -> None:
        self.now += seconds * 1e3


@dataclass
class OneOf:
    """A stage of its own on a GPU that others use too."""

    gpu: Gpu
    ms: Sequence[float]

    def launch(self, number: int, place: int, turn: int) -> float:
        self.gpu.ms = self.ms
        return self.gpu.launch(number, place, turn)

    def __getattr__(self, name: str) -> object:
        return getattr(self.gpu, name)


def own_states(rounds: Sequence[Mapping[int, Sequence[float]]], points: int) -> bool:
    """Whether each time at rest is one of a GPU at rest, and each under load one of a GPU that is limited."""
    return all(
        [round(math.exp(t), 4) for t in times]
        == [1.02 if number else 1.0] * points + [round(1.3 * 0.97, 4) if number else 1.3] * points
        for one in rounds
        for number, times in one.items()
    )


@pytest.mark.parametrize("ms", [[0.5], [2.6, 1.5, 1.9, 2.2]])
@pytest.mark.parametrize("many", [2, 9])
def test_each_state_is_its_own(ms: list[float], many: int) -> None:
    gpu, alive = Gpu(ms), list(range(many))
    for _ in range(3):  # one after another: what was loaded comes to rest again
        (rounds,) = clock.time_rounds([gpu], [alive], 16, both=True, sleep=gpu.sleep)
        assert [sorted(one) for one in rounds] == [alive] * 16
        assert own_states(rounds, len(ms))


def test_several_entries_in_one_go_share_each_state() -> None:
    gpu, slept = Gpu([]), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        gpu.sleep(seconds)

    stages = [OneOf(gpu, ms) for ms in ([0.5], [1.5, 0.7], [2.0])]
    alive = [[0, 1], [0, 3, 4], [0, 2]]
    for stage, mine, rounds in zip(
        stages, alive, clock.time_rounds(stages, alive, 8, both=True, sleep=sleep), strict=True
    ):
        assert [list(one) for one in rounds] == [mine, mine[::-1]] * 4
        assert own_states(rounds, len(stage.ms))
    assert slept.count(clock.COOL) == 1


def test_the_simulated_gpu_would_notice() -> None:
    gpu = Gpu([1.0])
    marks = [gpu.launch(0, 0, 0) for _ in range(150)]
    assert marks[0] == 1.0 and marks[-1] == 1.3


@pytest.mark.parametrize("both", [False, True])
def test_the_sample_that_does_not_end_is_the_one_that_is_waited_for(both: bool) -> None:
    whole = Gpu([6.0, 4.0])
    clock.time_rounds([whole], [[0, 1, 2]], 3, both=both, sleep=whole.sleep)
    assert len(whole.asked) > 18  # those that are not timed too
    for hangs, (number, _, _) in enumerate(whole.asked):
        gpu = Gpu([6.0, 4.0], hangs=hangs)
        with pytest.raises(Hung):
            clock.time_rounds([gpu], [[0, 1, 2]], 3, both=both, sleep=gpu.sleep)
        assert gpu.reached[-1] == number
        assert len(gpu.reached) == hangs + 1


def test_one_state_alone_takes_no_pauses() -> None:
    gpu, slept = Gpu([0.5, 0.5]), []
    ((one, other),) = clock.time_rounds([gpu], [[0, 1, 2]], 2, both=False, sleep=slept.append)
    assert not slept
    assert [len(times) for times in one.values()] == [2, 2, 2]
    assert list(one) == [0, 1, 2] and list(other) == [2, 1, 0]  # the order turns
    assert gpu.asked[0] == (0, 0, 0) and len(gpu.asked) == 1 + 2 * 2 * 3
