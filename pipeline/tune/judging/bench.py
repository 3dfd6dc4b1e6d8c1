"""Timing the tactics of one op side by side, the way that serving runs them.

On a GPU each candidate is a CUDA graph of several calls. The calls go round copies of the op's weights that together
exceed the L2 cache, so that every call reads its weights from memory, as a layer of a model does; activations stay
where they are, as they do behind the layer before. A round replays every candidate once; rounds alternate the order.

On a CPU the same rounds are timed with the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.tune.tuner import Question

from .rule import Round
from .samples import CALLS

_CPU_MS = 0.5


@dataclass(frozen=True)
class Candidate:
    """A runner by its place in the question, and its tactic."""

    runner: int
    tactic: Any


DEFAULT = Candidate(0, -1)  # what FlashInfer runs for a key that it does not know


class Trying(Protocol):
    """Notes which candidate is run, in case it ends this process or never returns."""

    def now(self, number: int | None) -> None:
        """The candidate at this place is run now; None: all have been."""

    def often(self, numbers: Sequence[int]) -> Callable[[int], None]:
        """The same for these in many short runs in a row, quickly."""


class Untold:
    """Nobody asks which candidate is run."""

    def now(self, number: int | None) -> None:
        """Say nothing."""

    def often(self, numbers: Sequence[int]) -> Callable[[int], None]:  # noqa: ARG002
        """Say nothing, often."""
        return self.now


class Bench(Protocol):
    """The candidates of one key, ready to be timed."""

    failed: dict[int, str]

    def rounds(self, alive: Sequence[int], count: int, *, quick: bool = False) -> list[Round]:
        """Time `count` rounds of the candidates `alive`; `quick` at rest alone."""


def run(point: Question, inputs: Sequence[Any], candidate: Candidate) -> None:
    """One call."""
    point.runners[candidate.runner](list(inputs), tactic=candidate.tactic, **point.kwargs)


def prepared(point: Question, candidate: Candidate) -> None:
    """What FlashInfer does once for a runner before it measures its tactics."""
    code = point.runners[candidate.runner].forward.__code__
    if "do_preparation" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        point.runners[candidate.runner](list(point.inputs), tactic=-1, do_preparation=True, **point.kwargs)


def words(error: BaseException) -> str:
    """An error in a line of 200 characters at most."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


class CpuBench:
    """Wall-clock rounds of calls that block their caller."""

    def __init__(self, points: Sequence[Question], candidates: Sequence[Candidate], trying: Trying) -> None:
        self._points, self._candidates, self._trying = points, candidates, trying
        self.failed: dict[int, str] = {}
        self._calls: list[int] = []
        for number, candidate in enumerate(candidates):
            trying.now(number)
            try:
                for point in points:
                    prepared(point, candidate)
                    run(point, point.inputs, candidate)
            except Exception as error:  # noqa: BLE001 - a tactic may fail in any way
                self.failed[number] = words(error)
        trying.now(0)
        for point in points:
            began = time.perf_counter()
            if 0 not in self.failed:
                run(point, point.inputs, candidates[0])
            spent = (time.perf_counter() - began) * 1e3
            self._calls.append(max(1, min(CALLS, math.ceil(_CPU_MS / max(spent, 1e-3)))))
        trying.now(None)

    def rounds(self, alive: Sequence[int], count: int, *, quick: bool = False) -> list[Round]:  # noqa: ARG002 - a CPU has one state
        """Time `count` rounds, forwards and backwards in turn."""
        found: list[Round] = []
        trying = self._trying.often(alive)
        for turn in range(count):
            order = alive if turn % 2 == 0 else alive[::-1]
            found.append({number: self._times(number, trying) for number in order})
        self._trying.now(None)
        return found

    def _times(self, number: int, trying: Callable[[int], None]) -> tuple[float, ...]:
        trying(number)  # what came back once may not come back now
        times: list[float] = []
        for point, calls in zip(self._points, self._calls, strict=True):
            began = time.perf_counter()
            for _ in range(calls):
                run(point, point.inputs, self._candidates[number])
            times.append(math.log(max(1e-9, (time.perf_counter() - began) * 1e3 / calls)))
        return tuple(times)
