"""Timing the tactics of one entry side by side, the way that serving runs them.

On a GPU each candidate is a CUDA graph of several calls for each point (token count). The calls go round copies of the
weights, and the L2 cache is emptied before each sample, so that every call reads its weights from memory, as a layer of
a model does. Each candidate has two graphs with copies of their own, and rounds alternate between them: some kernels
are 6 % faster in one graph than in the next one of the same calls (seen). On a CPU the same samples are plain calls.

A runner is prepared once for each point, before any graph is captured: preparing again may free memory that earlier
graphs read (cutlass_fused_moe keeps one workspace for all of a process).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from pipeline.tune import flashinfer_api, hooks
from pipeline.tune.cpu_shim import CPU_CUDA
from pipeline.tune.guard import survive
from pipeline.tune.tuner import Question

from . import clock
from .decide import Batch

SETS = 2  # graphs of each candidate, each with copies of its own; a batch of rounds for each
CALLS, SAMPLE_MS = 128, 0.25  # calls of one sample at most; a sample lasts about so long
_L2_TIMES = 3  # the copies of the weights exceed the L2 cache this many times
_EVICT_TIMES = 2  # so many times its size is read to empty it
_SHARE = 16  # one set where two would take more than this part of the device's memory
_WAKE = 0.25  # seconds of work before the first sample of a process

Tell = Callable[[int | None], None]  # which candidate runs now, in case it ends this process or never returns


@dataclass(frozen=True)
class Candidate:
    """A runner by its place in the question, and its tactic."""

    runner: int
    tactic: Any


DEFAULT = Candidate(0, -1)  # what FlashInfer runs for a key that it does not know


def nobody(_: int | None) -> None:
    """Nobody asks which candidate runs."""


@dataclass(frozen=True)
class Asked:
    """An entry to be timed: the token counts that it answers, the bucket first, and its candidates by number."""

    points: Sequence[Question]
    candidates: Mapping[int, Candidate]  # 0: the default
    bucket: int
    tell: Tell = nobody


@dataclass(frozen=True)
class Answer:
    """The batches of one entry in one process; which candidates failed and why; or why nothing could be timed."""

    batches: Sequence[Batch] = ()
    failed: Mapping[int, str] = field(default_factory=dict)
    error: str = ""


def words(error: BaseException) -> str:
    """An error in one line of 200 characters at most."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:200]


def run(point: Question, inputs: Sequence[Any], candidate: Candidate) -> None:
    """One call."""
    call = functools.partial(point.runners[candidate.runner], list(inputs), tactic=candidate.tactic, **point.kwargs)
    hooks.at("timed_call", inputs, candidate.tactic, call)
    call()


class Sample(NamedTuple):
    """The events around the calls of one sample."""

    begin: Any
    end: Any
    calls: int


class Bench(clock.Stage):
    """The candidates of one entry, ready to be timed at each point. `failed` says which cannot be run, and why.

    On a GPU a sample is a CUDA graph, and a candidate that cannot be captured is out. On a CPU it is the calls.
    `ms` is about what one sample takes at each point; `both`: rounds are timed in both states of the clock.
    """

    def __init__(self, asked: Asked, buffers: RotatingBuffers) -> None:
        self.points, self.candidates, self.tell = asked.points, asked.candidates, asked.tell
        self.both, self.failed = asked.bucket >= clock.BOTH_FROM, dict[int, str]()
        self._device, self._cuda = buffers.device, cuda_of(buffers.device)
        self._graphs = hasattr(self._cuda, "CUDAGraph")
        for place in sorted({one.runner for one in self.candidates.values()}):
            self.tell(next(number for number, one in self.candidates.items() if one.runner == place))
            for point in self.points:
                flashinfer_api.prepare(point, place)
        self._sets = buffers.sets(self.points)
        self._pool = self._cuda.graph_pool_handle() if self._graphs else None
        self._samples: dict[int, list[list[Callable[[], None]]]] = {}  # by candidate, set of copies and point
        if self._try_to(0, self._measure):
            for number in self.candidates:
                self._try_to(number, self._prepare)
        self.tell(None)

    def _try_to(self, number: int, what: Callable[[int], None]) -> bool:
        """Do something with a candidate; note where it fails. Raises `DeviceLost`."""
        self.tell(number)
        try:
            what(number)
        except Exception as error:  # noqa: BLE001 - a tactic may fail in any way
            self.failed[number] = words(error)
            survive(error)
            return False
        return True

    def _measure(self, default: int) -> None:
        """How long one call of the default takes at each point, and so how many calls a sample has."""
        took: list[float] = []
        for point, inputs in zip(self.points, self._sets[0], strict=True):
            run(point, inputs[0], self.candidates[default])
            sample = self._sample(point, inputs, default, len(inputs))
            begin, end = self._events()
            sample()
            begin.record()
            sample()
            end.record()
            end.synchronize()
            took.append(max(1e-3, float(begin.elapsed_time(end)) / len(inputs)))
        # Powers of two are alike in all processes
        self._calls = [min(CALLS, 2 ** round(math.log2(max(1.0, SAMPLE_MS / call)))) for call in took]
        self.ms = [call * calls for call, calls in zip(took, self._calls, strict=True)]

    def _prepare(self, number: int) -> None:
        for point, inputs in zip(self.points, self._sets[0], strict=True):
            for one in inputs[:2]:
                run(point, one, self.candidates[number])
        self._cuda.synchronize(self._device)
        self._samples[number] = [
            [
                self._sample(point, inputs, number, calls)
                for point, inputs, calls in zip(self.points, one, self._calls, strict=True)
            ]
            for one in self._sets
        ]

    def _sample(self, point: Question, inputs: list[list[Any]], number: int, calls: int) -> Callable[[], None]:
        """What runs so many calls of a candidate."""

        def run_all() -> None:
            for call in range(calls):
                run(point, inputs[call % len(inputs)], self.candidates[number])

        if not self._graphs:
            return run_all
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._pool):
            run_all()
        graph.replay()
        self._cuda.synchronize(self._device)
        replay: Callable[[], None] = graph.replay
        return replay

    def _events(self) -> tuple[Any, Any]:
        return self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)

    def launch(self, candidate: int, point: int, turn: int) -> Sample:
        """Run a sample of a candidate at a point; the sets of copies take turns (`set_of`)."""
        begin, end = self._events()
        evict(self._device)
        one = self.candidates[candidate]
        if not self._graphs:  # it blocks here; on a GPU `reach` says what is waited for
            self.tell(candidate)
        hooks.at("launch", self.points[point].inputs, self.points[point].runners[one.runner], one.tactic)
        begin.record()
        self._samples[candidate][set_of(turn) % len(self._sets)][point]()
        end.record()
        return Sample(begin, end, self._calls[point])

    def reach(self, candidate: int, mark: Sample) -> None:
        """Wait for a sample, having named its candidate: samples end in the order in which they began."""
        if not mark.end.query():
            self.tell(candidate)
            mark.end.synchronize()

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        self._cuda.synchronize(self._device)
        self.tell(None)

    def read(self, mark: Sample) -> float:
        """ln(milliseconds) of one call."""
        return math.log(max(1e-6, mark.begin.elapsed_time(mark.end)) / mark.calls)


class RotatingBuffers:
    """Copies of weights in other memory; points that share a weight share its copies."""

    def __init__(self, device: torch.device) -> None:
        properties = cuda_of(device).get_device_properties(device)
        self.device = device
        self._cache, self._memory = int(properties.L2_cache_size), int(properties.total_memory)
        self._clones: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}

    def sets(self, points: Sequence[Question]) -> list[list[list[list[Any]]]]:
        """For each set and point the inputs, over and over with the weights in other memory.

        What the tuning config makes dynamic follows the token count: activations and outputs, which stay where they
        are, as they do behind the layer before. A flat tensor of bytes is a workspace and is not copied.
        """
        sizes = [sum(point.inputs[i].nbytes for i in _weights(point)) for point in points]
        counts = [self._count(size) for size in sizes]
        fits = all(SETS * n * size <= self._memory // _SHARE for n, size in zip(counts, sizes, strict=True))
        return [
            [self._turned(point, n, one) for point, n in zip(points, counts, strict=True)]
            for one in range(SETS if fits else 1)
        ]

    def _count(self, size: int) -> int:
        return max(2, min(16, math.ceil(_L2_TIMES * self._cache / size))) if 1 << 20 < size < 1 << 30 else 1

    def _turned(self, point: Question, count: int, one: int) -> list[list[Any]]:
        turned: list[list[Any]] = []
        for copy in range(count):
            again = list(point.inputs)
            for index in _weights(point):
                again[index] = self._clone(point.inputs[index], one * count + copy)
            turned.append(again)
        return turned

    def _clone(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        clones = self._clones.setdefault((tensor.data_ptr(), tuple(tensor.shape)), [tensor])
        while len(clones) <= number:
            clones.append(tensor.clone())
        return clones[number]


def _weights(point: Question) -> list[int]:
    """The inputs on the device that do not follow the token count, workspaces aside."""
    moving = {index for spec in point.config.dynamic_tensor_specs for index in spec.input_idx}
    moving |= {spec.input_idx for spec in point.config.constraint_specs}
    return [
        index
        for index, tensor in enumerate(point.inputs)
        if isinstance(tensor, torch.Tensor)
        and index not in moving
        and not (tensor.dim() == 1 and tensor.dtype in (torch.uint8, torch.int8))
    ]


@functools.cache
def _filler(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read to empty the cache, and a place for the result; made once, with the device woken by reading it.

    The first entry that a process timed was measured at up to 2.8 times its time (seen): the device was not awake.
    """
    cuda = cuda_of(device)
    size = _EVICT_TIMES * int(cuda.get_device_properties(device).L2_cache_size)
    much, result = torch.zeros(size // 4, dtype=torch.float32, device=device), torch.zeros((), device=device)
    until = time.monotonic() + _WAKE
    while time.monotonic() < until:
        for _ in range(16):
            torch.amax(much, dim=0, out=result)
        cuda.synchronize(device)
    return much, result


def evict(device: torch.device) -> None:
    """Let the device read so much that nothing older is left in its L2 cache, without waiting; nothing is written."""
    much, result = _filler(device)
    torch.amax(much, dim=0, out=result)


def set_of(turn: int) -> int:
    """Which set of copies a round uses: two rounds with one, forwards and backwards, then two with the next."""
    return turn // 2 % SETS


def cuda_of(device: torch.device) -> Any:  # noqa: ANN401 - a module or an object
    """`torch.cuda`; on a CPU an object with the functions of it that are used here."""
    return hooks.changed("cuda", torch.cuda if device.type == "cuda" else CPU_CUDA)


def time_entries(device: torch.device, asked: Sequence[Asked], count: int) -> list[Answer]:
    """Time `count` rounds of each entry; in one go where both states of the clock count for all of them.

    Raises `DeviceLost`.
    """
    try:
        return _timed(device, asked, count)
    finally:
        cuda_of(device).empty_cache()


def _timed(device: torch.device, asked: Sequence[Asked], count: int) -> list[Answer]:
    answers: list[Answer] = []
    benches: dict[int, Bench] = {}  # by the place of the entry
    buffers = RotatingBuffers(device)
    for place, one in enumerate(asked):
        try:
            hooks.at("make_bench", one.bucket)
            bench = Bench(one, buffers)
        except Exception as error:  # noqa: BLE001 - an entry may fail in any way, such as for want of memory
            survive(error)
            answers.append(Answer(error=words(error)))
            continue
        answers.append(Answer(failed=bench.failed))
        if 0 not in bench.failed:
            benches[place] = bench
    try:
        found = dict(zip(benches, _rounds(list(benches.values()), count), strict=True))
    except Exception as error:  # noqa: BLE001
        survive(error)
        return [Answer(error=words(error))] * len(asked)
    return [replace(answer, batches=found.get(place, ())) for place, answer in enumerate(answers)]


def _rounds(benches: Sequence[Bench], count: int) -> list[list[Batch]]:
    """The batches of each bench, one for each set of copies."""
    alive = [[number for number in one.candidates if number not in one.failed] for one in benches]
    if all(one.both for one in benches):
        found = clock.time_rounds(benches, alive, count, both=True) if benches else []
    else:
        pairs = zip(benches, alive, strict=True)
        found = [clock.time_rounds([one], [mine], count, both=one.both)[0] for one, mine in pairs]
    return [
        [[one for turn, one in enumerate(rounds) if set_of(turn) == place] for place in range(SETS)] for rounds in found
    ]
