"""The bench of a GPU: each candidate as CUDA graphs, timed at rest and under load.

A graph holds several calls. They go round copies of the op's weights that together exceed the L2 cache, so that every
call reads its weights from memory, as a layer of a model does; activations stay where they are, as they do behind the
layer before. Each candidate has two graphs with copies of their own, and rounds go from one to the other: some kernels
are 6 % faster in one graph than in the next one that is made of the same calls (seen).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pipeline.tune.guard import survive
from pipeline.tune.tuner import Question

from . import power
from .bench import CALLS, DEFAULT, Candidate, Trying, prepared, run, words
from .rule import Round

_GRAPH_MS = 0.5  # a replay lasts about this long at least, so that launching it is a small part
_TURNS = 4  # around the copies, to find how long a call takes
_L2_TIMES = 3  # the copies of the weights exceed the L2 cache this many times
_SETS, _SHARE = 2, 16  # graphs of each candidate; one if the copies took more than this part of the device's memory
_SMALL, _PLACES = 4 << 20, 4  # bytes of an activation that is moved about, and to how many places


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
        *,
        both: bool,
    ) -> None:
        self._points, self._candidates, self._device, self._both = points, candidates, device, both
        self._trying = trying
        self.failed: dict[int, str] = {}
        copies = _Copies(device)
        self._sets = copies.sets(points)
        self._pool = torch.cuda.graph_pool_handle()
        trying.now(0)
        taken = [self._taken(point, inputs) for point, inputs in zip(points, self._sets[0], strict=True)]
        self._calls = [_calls(ms, len(inputs)) for ms, inputs in zip(taken, self._sets[0], strict=True)]
        self.ms: Sequence[float] = [ms * calls for ms, calls in zip(taken, self._calls, strict=True)]
        self._graphs: dict[int, list[list[torch.cuda.CUDAGraph]] | None] = {}
        for number in range(len(candidates)):
            trying.now(number)
            self._add(number)
            if number == 0 and 0 in self.failed:
                break
        trying.now(None)

    def rounds(self, alive: Sequence[int], count: int, *, quick: bool = False) -> list[Round]:
        """Whole rounds between events, at rest and then under load; `quick`, or where that is alike, at rest alone."""
        return power.rounds(self, alive, count, both=self._both and not quick)

    def queue(self, number: int, place: int, turn: int) -> Sample:
        """Replay a candidate's graph of a point, without waiting; the sets of copies take turns."""
        turned = turn // 2 % len(self._sets)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graphs, calls = self._graphs[number], self._calls[place]
        begin.record()
        if graphs is not None:
            graphs[turned][place].replay()
        else:
            inputs = self._sets[turned][place]
            for call in range(calls):
                run(self._points[place], inputs[call % len(inputs)], self._candidates[number])
        end.record()
        return Sample(begin, end, calls)

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
                    self._capture(point, inputs, candidate, calls)
                    for point, inputs, calls in zip(self._points, one, self._calls, strict=True)
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
            return _GRAPH_MS
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
        self, point: Question, inputs: list[list[Any]], candidate: Candidate, calls: int
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for call in range(calls):
                run(point, inputs[call % len(inputs)], candidate)
        graph.replay()
        torch.cuda.synchronize(self._device)
        return graph


def _calls(ms: float, copies: int) -> int:
    """How many calls one sample holds: whole turns around the copies, long enough to be timed."""
    turns = math.ceil(_GRAPH_MS / ms / copies)
    return max(1, min(turns, CALLS // copies)) * copies


class _Copies:
    """Copies of weights in other memory; points that share a weight share its copies."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._cache, self._memory = int(properties.L2_cache_size), int(properties.total_memory)
        self._clones: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}

    def sets(self, points: Sequence[Question]) -> list[list[list[list[Any]]]]:
        """For each set and point the inputs, over and over with the weights in other memory.

        What the tuning config makes dynamic follows the token count: activations and outputs. Small ones get a few
        copies that all fit into the cache, since the time of some kernels depends on where they lie. A flat tensor of
        bytes is a workspace and is not copied.
        """
        sizes = [sum(point.inputs[i].nbytes for i in _still(point)) for point in points]
        counts = [self._count(size) for size in sizes]
        fits = all(_SETS * n * size <= self._memory // _SHARE for n, size in zip(counts, sizes, strict=True))
        number = _SETS if fits else 1
        return [[self._turned(point, n, one) for point, n in zip(points, counts, strict=True)] for one in range(number)]

    def _count(self, size: int) -> int:
        return max(2, min(16, math.ceil(_L2_TIMES * self._cache / size))) if 1 << 20 < size < 1 << 30 else 1

    def _turned(self, point: Question, count: int, one: int) -> list[list[Any]]:
        still, small = _still(point), _small(point)
        turned: list[list[Any]] = []
        for copy in range(count):
            again = list(point.inputs)
            for index in still:
                again[index] = self._clone(point.inputs[index], one * count + copy)
            for index in small if copy or one else ():
                again[index] = turned[copy % _PLACES][index] if copy >= _PLACES else point.inputs[index].clone()
            turned.append(again)
        return turned

    def _clone(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor itself as number 0, else a copy of it."""
        clones = self._clones.setdefault((tensor.data_ptr(), tuple(tensor.shape)), [tensor])
        while len(clones) <= number:
            clones.append(tensor.clone())
        return clones[number]


def _moving(point: Question) -> set[int]:
    """The inputs that follow the token count."""
    moving = {index for spec in point.config.dynamic_tensor_specs for index in spec.input_idx}
    return moving | {spec.input_idx for spec in point.config.constraint_specs}


def _still(point: Question) -> list[int]:
    """The inputs that do not, on the device, workspaces aside."""
    moving = _moving(point)
    return [
        index
        for index, tensor in enumerate(point.inputs)
        if isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cuda"
        and index not in moving
        and not (tensor.dim() == 1 and tensor.dtype in (torch.uint8, torch.int8))
    ]


def _small(point: Question) -> list[int]:
    return [i for i in _moving(point) if isinstance(point.inputs[i], torch.Tensor) and point.inputs[i].nbytes <= _SMALL]


def _clear_error() -> None:
    """Take back an error that a kernel left behind, where it can be taken back."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaGetLastError()
