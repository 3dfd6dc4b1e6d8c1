"""Timing the tactics of one op side by side, the way that serving runs them.

On a GPU each candidate is a CUDA graph of several calls. The calls go round copies of the op's weights that together
exceed the L2 cache, so that every call reads its weights from memory, as a layer of a model does; activations stay
where they are, as they do behind the layer before. A round replays every candidate once; rounds alternate the order.

On a CPU the same rounds are timed with the wall clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.tune.guard import survive
from pipeline.tune.tuner import Question

from .rule import Round

_GRAPH_MS = 0.5  # a replay lasts about this long at least, so that launching it is a small part
_CALLS = 128  # calls of one graph at most
_L2_TIMES = 3  # the copies of the weights exceed the L2 cache this many times
_SMALL, _PLACES = 4 << 20, 4  # bytes of an activation that is moved about, and to how many places
_CPU_MS = 0.5


@dataclass(frozen=True)
class Candidate:
    """A runner by its place in the question, and its tactic."""

    runner: int
    tactic: Any


Trying = Callable[[Candidate | None], None]  # told a candidate before its first run, None when it has been run
DEFAULT = Candidate(0, -1)  # what FlashInfer runs for a key that it does not know


class Bench(Protocol):
    """The candidates of one key, ready to be timed."""

    failed: dict[int, str]

    def rounds(self, alive: Sequence[int], count: int) -> list[Round]:
        """Time `count` rounds of the candidates `alive`."""


def bench(points: Sequence[Question], candidates: Sequence[Candidate], device: torch.device, trying: Trying) -> Bench:
    """Prepare the candidates at every point; those that fail are in `failed`, with the reason, and are never timed."""
    if device.type == "cuda":
        return GpuBench(points, candidates, device, trying)
    return CpuBench(points, candidates, trying)


def _run(point: Question, inputs: Sequence[Any], candidate: Candidate) -> None:
    point.runners[candidate.runner](list(inputs), tactic=candidate.tactic, **point.kwargs)


def _prepared(point: Question, candidate: Candidate) -> None:
    """What FlashInfer does once for a runner before it measures its tactics."""
    code = point.runners[candidate.runner].forward.__code__
    if "do_preparation" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        point.runners[candidate.runner](list(point.inputs), tactic=-1, do_preparation=True, **point.kwargs)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


class CpuBench:
    """Wall-clock rounds of calls that block their caller."""

    def __init__(self, points: Sequence[Question], candidates: Sequence[Candidate], trying: Trying) -> None:
        self._points, self._candidates = points, candidates
        self.failed: dict[int, str] = {}
        self._calls: list[int] = []
        for number, candidate in enumerate(candidates):
            trying(candidate)
            try:
                for point in points:
                    _prepared(point, candidate)
                    _run(point, point.inputs, candidate)
            except Exception as error:  # noqa: BLE001 - a tactic may fail in any way
                self.failed[number] = _words(error)
        trying(None)
        for point in points:
            began = time.perf_counter()
            if 0 not in self.failed:
                _run(point, point.inputs, candidates[0])
            spent = (time.perf_counter() - began) * 1e3
            self._calls.append(max(1, min(_CALLS, math.ceil(_CPU_MS / max(spent, 1e-3)))))

    def rounds(self, alive: Sequence[int], count: int) -> list[Round]:
        """Time `count` rounds, forwards and backwards in turn."""
        found: list[Round] = []
        for turn in range(count):
            order = alive if turn % 2 == 0 else alive[::-1]
            found.append({number: tuple(self._times(number)) for number in order})
        return found

    def _times(self, number: int) -> list[float]:
        times: list[float] = []
        for point, calls in zip(self._points, self._calls, strict=True):
            began = time.perf_counter()
            for _ in range(calls):
                _run(point, point.inputs, self._candidates[number])
            times.append(math.log(max(1e-9, (time.perf_counter() - began) * 1e3 / calls)))
        return times


class GpuBench:
    """CUDA graphs, or plain calls where the default cannot be captured."""

    def __init__(
        self, points: Sequence[Question], candidates: Sequence[Candidate], device: torch.device, trying: Trying
    ) -> None:
        self._candidates, self._device = candidates, device
        self.failed: dict[int, str] = {}
        self._inputs = [(point, _rotated(point, device)) for point in points]
        self._calls = [self._count(point, inputs) for point, inputs in self._inputs]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, list[torch.cuda.CUDAGraph] | None] = {}
        for number, candidate in enumerate(candidates):
            trying(candidate)
            self._add(number)
            if number == 0 and 0 in self.failed:
                break
        trying(None)

    def _add(self, number: int) -> None:
        candidate = self._candidates[number]
        try:
            for point, inputs in self._inputs:
                _prepared(point, candidate)
                for one in inputs[:2]:
                    _run(point, one, candidate)
            torch.cuda.synchronize(self._device)
        except Exception as error:  # noqa: BLE001 - a tactic may fail in any way
            self.failed[number] = _words(error)
            survive(error)
            return
        if number and self._graphs[0] is None:
            self._graphs[number] = None
            return
        try:
            self._graphs[number] = [
                self._capture(point, inputs, candidate, calls)
                for (point, inputs), calls in zip(self._inputs, self._calls, strict=True)
            ]
        except Exception as error:  # noqa: BLE001
            survive(error)
            if number == 0:
                self._graphs[0] = None
            else:
                self.failed[number] = f"as a CUDA graph: {_words(error)}"

    def _count(self, point: Question, inputs: list[list[Any]]) -> int:
        """How many calls one sample holds: whole turns around the copies, long enough to be timed."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            for one in inputs:
                _run(point, one, self._candidates[0])
            begin.record()
            for one in inputs:
                _run(point, one, self._candidates[0])
            end.record()
            end.synchronize()
        except Exception:  # noqa: BLE001 - found again, and told, when the default is prepared
            _clear_error()
            return len(inputs)
        spent = begin.elapsed_time(end) / len(inputs)
        turns: int = math.ceil(_GRAPH_MS / max(spent, 1e-3) / len(inputs))
        return max(1, min(turns, _CALLS // len(inputs))) * len(inputs)

    def _capture(
        self, point: Question, inputs: list[list[Any]], candidate: Candidate, calls: int
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for call in range(calls):
                _run(point, inputs[call % len(inputs)], candidate)
        graph.replay()
        torch.cuda.synchronize(self._device)
        return graph

    def rounds(self, alive: Sequence[int], count: int) -> list[Round]:
        """Queue whole rounds between events and wait once: the GPU never idles inside a round.

        What is replayed first meets an idle GPU and would be charged for its launch, so it is not timed.
        """
        marks: list[dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]]] = []
        self._queue(0)
        for turn in range(count):
            order = alive if turn % 2 == 0 else alive[::-1]
            marks.append({number: self._queue(number) for number in order})
        torch.cuda.synchronize(self._device)
        return [
            {
                number: tuple(
                    math.log(max(1e-6, begin.elapsed_time(end)) / calls)
                    for (begin, end), calls in zip(pairs, self._calls, strict=True)
                )
                for number, pairs in one.items()
            }
            for one in marks
        ]

    def _queue(self, number: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        graphs = self._graphs[number]
        for place, ((point, inputs), calls) in enumerate(zip(self._inputs, self._calls, strict=True)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            if graphs is not None:
                graphs[place].replay()
            else:
                for call in range(calls):
                    _run(point, inputs[call % len(inputs)], self._candidates[number])
            end.record()
            pairs.append((begin, end))
        return pairs


def _rotated(point: Question, device: torch.device) -> list[list[Any]]:
    """The inputs, and copies with the weights in other memory, until they exceed the L2 cache.

    What the tuning config makes dynamic follows the token count: activations and outputs. Small ones get a few copies
    that all fit into the cache, since the time of some kernels depends on where they lie. A flat tensor of bytes is a
    workspace and is not copied.
    """
    moving = {index for spec in point.config.dynamic_tensor_specs for index in spec.input_idx}
    moving |= {spec.input_idx for spec in point.config.constraint_specs}
    still = [
        index
        for index, tensor in enumerate(point.inputs)
        if isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cuda"
        and index not in moving
        and not (tensor.dim() == 1 and tensor.dtype in (torch.uint8, torch.int8))
    ]
    size = sum(point.inputs[index].numel() * point.inputs[index].element_size() for index in still)
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    copies = max(2, min(16, math.ceil(_L2_TIMES * cache / size))) if 1 << 20 < size < 1 << 30 else 1
    small = [i for i in moving if isinstance(point.inputs[i], torch.Tensor) and point.inputs[i].nbytes <= _SMALL]
    turned = [list(point.inputs)]
    for copy in range(1, copies):
        again = [t.clone() if index in still else t for index, t in enumerate(point.inputs)]
        for index in small:
            again[index] = turned[copy % _PLACES][index] if copy >= _PLACES else point.inputs[index].clone()
        turned.append(again)
    return turned


def _clear_error() -> None:
    """Take back an error that a kernel left behind, where it can be taken back."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaGetLastError()
