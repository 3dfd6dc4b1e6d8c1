"""The bench of a GPU: each candidate as CUDA graphs, timed at rest and under load.

A graph holds several calls, each of which reads its weights from memory, as a layer of a model does (see `cold`);
activations stay where they are, as they do behind the layer before. Each candidate has two graphs with copies of their
own, and rounds go from one to the other: some kernels are 6 % faster in one graph than in the next one that is made of
the same calls (seen).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pipeline.tune.guard import survive
from pipeline.tune.tuner import Question

from . import power
from .bench import DEFAULT, Candidate, Trying, prepared, run, words
from .cold import Copies, evict
from .rule import Round
from .samples import calls

_UNKNOWN_MS = 0.5  # for a call of a default that cannot be run
_TURNS = 4  # around the copies, to find how long a call takes
_WAKE, _AT_ONCE = 0.25, 16  # seconds of work before the first sample of a process, and how much is launched at a time


class Sample(NamedTuple):
    """The events around the calls of one sample."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    calls: int


class GpuBench:
    """CUDA graphs, or plain calls where the default cannot be captured."""

    def __init__(
        self,
        points: Sequence[Question],
        candidates: Sequence[Candidate],
        device: torch.device,
        trying: Trying,
        copies: Copies,
        *,
        both: bool,
    ) -> None:
        self._points, self._candidates, self._device, self.both = points, candidates, device, both
        self._trying = trying
        self.failed: dict[int, str] = {}
        self._sets = copies.sets(points)
        self._pool = torch.cuda.graph_pool_handle()
        trying.now(0)
        taken = [self._taken(point, inputs) for point, inputs in zip(points, self._sets[0], strict=True)]
        self._calls = [calls(ms, len(one), len(points)) for ms, one in zip(taken, self._sets[0], strict=True)]
        self._part = [number < len(one) for number, one in zip(self._calls, self._sets[0], strict=True)]
        self.ms: Sequence[float] = [ms * many for ms, many in zip(taken, self._calls, strict=True)]
        self._graphs: dict[int, list[list[torch.cuda.CUDAGraph]] | None] = {}
        for number in range(len(candidates)):
            trying.now(number)
            self._add(number)
            if number == 0 and 0 in self.failed:
                break
        trying.now(None)

    def rounds(self, alive: Sequence[int], count: int, *, quick: bool = False) -> list[Round]:
        """Whole rounds between events, at rest and then under load; `quick`, or where that is alike, at rest alone."""
        return power.rounds([(self, alive)], count, both=self.both and not quick)[0]

    def wake(self) -> None:
        """Keep the device at work for a while, the first time that this process times anything."""
        _woken(self._device)

    def queue(self, number: int, place: int, turn: int) -> Sample:
        """Replay a candidate's graph of a point, without waiting; the sets of copies take turns."""
        turned = turn // 2 % len(self._sets)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graphs, many = self._graphs[number], self._calls[place]
        if self._part[place]:
            evict(self._device)
        begin.record()
        if graphs is not None:
            graphs[turned][place].replay()
        else:
            inputs = self._sets[turned][place]
            for call in range(many):
                run(self._points[place], inputs[call % len(inputs)], self._candidates[number])
        end.record()
        return Sample(begin, end, many)

    def reach(self, number: int, mark: Sample) -> None:
        """Until a sample has ended; which candidate's it is that is waited for is said before.

        Samples end in the order in which they were begun, so the first that has not ended is the one that is running.
        Nothing is said while they are begun: a launch that has to wait, because the device takes no more of them
        behind a tactic that does not return, names none.
        """
        if not mark.end.query():
            self._trying.now(number)
            mark.end.synchronize()

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        torch.cuda.synchronize(self._device)
        self._trying.now(None)

    def read(self, mark: Sample) -> float:
        """ln(milliseconds) of one call."""
        return math.log(max(1e-6, mark.begin.elapsed_time(mark.end)) / mark.calls)

    def _add(self, number: int) -> None:
        candidate = self._candidates[number]
        try:
            for point, inputs in zip(self._points, self._sets[0], strict=True):
                prepared(point, candidate)
                for one in inputs[:2]:
                    run(point, one, candidate)
            torch.cuda.synchronize(self._device)
        except Exception as error:  # noqa: BLE001 - a tactic may fail in any way
            self.failed[number] = words(error)
            survive(error)
            return
        if number and self._graphs[0] is None:
            self._graphs[number] = None
            return
        try:
            self._graphs[number] = [
                [
                    self._capture(point, inputs, candidate, many)
                    for point, inputs, many in zip(self._points, one, self._calls, strict=True)
                ]
                for one in self._sets
            ]
        except Exception as error:  # noqa: BLE001
            survive(error)
            if number == 0:
                self._graphs[0] = None
            else:
                self.failed[number] = f"as a CUDA graph: {words(error)}"

    def _taken(self, point: Question, inputs: list[list[Any]]) -> float:
        """Milliseconds that a call of the default takes in a graph, about; a small kernel takes longer to launch."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            for one in inputs:
                run(point, one, DEFAULT)
            turn = self._turn(point, inputs)
            begin.record()
            for _ in range(_TURNS):
                turn()
            end.record()
            end.synchronize()
        except Exception:  # noqa: BLE001 - found again, and told, when the default is prepared
            _clear_error()
            return _UNKNOWN_MS
        return max(1e-3, float(begin.elapsed_time(end)) / len(inputs) / _TURNS)

    def _turn(self, point: Question, inputs: list[list[Any]]) -> Callable[[], None]:
        """The default once around the copies: as a graph, or call by call where it cannot be captured."""

        def call_by_call() -> None:
            for one in inputs:
                run(point, one, DEFAULT)

        try:
            graph = self._capture(point, inputs, DEFAULT, len(inputs))
        except Exception as error:  # noqa: BLE001 - found again when its graphs are made
            survive(error)
            return call_by_call

        def replayed() -> None:
            graph.replay()

        return replayed

    def _capture(
        self, point: Question, inputs: list[list[Any]], candidate: Candidate, many: int
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for call in range(many):
                run(point, inputs[call % len(inputs)], candidate)
        graph.replay()
        torch.cuda.synchronize(self._device)
        return graph


@functools.cache
def _woken(device: torch.device) -> None:
    """Work for a quarter of a second, once for a process; nothing of a plan runs here.

    The first key that a process timed was measured at up to 2.8 times its time, all rounds alike, and the second one at
    its own (seen in eight processes on two H200s): the device, or the way to it, was not awake. No GPU has run this.
    """
    until = time.monotonic() + _WAKE
    while time.monotonic() < until:
        for _ in range(_AT_ONCE):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            evict(device)
            end.record()
        torch.cuda.synchronize(device)


def _clear_error() -> None:
    """Take back an error that a kernel left behind, where it can be taken back."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaGetLastError()
