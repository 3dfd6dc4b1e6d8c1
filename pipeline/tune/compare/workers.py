"""Processes beside a rank, on its own device, that time entries as the rank does and decide nothing.

Where a process's memory lies, and so how fast some kernels run in it, is settled when it starts: times from a second
process show what those of one cannot. A worker that ends or does not answer in time is killed and not started again;
the entries that are left then keep the default, and the manifest says so.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline import run
from pipeline.tune import hooks
from pipeline.tune.tied import starter, tie

from .decide import Batch, Key

if TYPE_CHECKING:
    import torch

    from pipeline.contract.plan import Plan
    from pipeline.tune.ops import Case
    from pipeline.tune.tuner import ObservedTuner

    from .timing import Candidate

GPU_WORKERS = 1  # with the rank two processes
_START = 180.0  # seconds for a worker to import and to take its device, on a machine that compiles meanwhile
_BEAT = 1.0

Asked = tuple[Key, Sequence[tuple[int, Any]]]  # an entry and its candidates: place of the runner, tactic as JSON
Tick = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The batches of one entry, or why there are none and which candidate failed (0: none did)."""

    batches: Sequence[Batch] = ()
    error: str = ""
    failed: int = 0


@dataclass
class Worker:
    """One process, as its rank sees it."""

    number: int
    pool: ProcessPoolExecutor
    pid: int = 0
    starting: Future[int] | None = None

    def call(self, seconds: float, tick: Tick, what: Callable[..., T], *words: object) -> T:
        """Run a function of this module there; raise what it raises, `BrokenProcessPool` or `TimeoutError`."""
        return wait(self.pool.submit(what, *words), seconds, tick, f"process {self.number}")

    def kill(self) -> None:
        """End it at once: whatever it still runs would disturb the others."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pool.shutdown(wait=False, cancel_futures=True)


def wait(future: Future[T], seconds: float, tick: Tick, whom: str) -> T:
    """A result, while saying that this rank is alive."""
    until = time.monotonic() + seconds
    while True:
        tick(whom)
        try:
            return future.result(timeout=max(0.01, min(_BEAT, until - time.monotonic())))
        except concurrent.futures.TimeoutError:
            if time.monotonic() >= until:
                raise TimeoutError(f"no answer within {seconds:.0f} s") from None


@dataclass
class Workers:
    """The workers of one rank. `patience` bounds one answer, in seconds; `wanted` is how many there should be."""

    all: list[Worker] = field(default_factory=list)
    wanted: int = 0
    patience: float = 60.0
    notes: list[str] = field(default_factory=list)

    def start(self, tick: Tick) -> dict[int, str]:
        """Wait until all have started; why those that did not have not, by number."""
        missing: dict[int, str] = {}
        for worker in self.all:
            try:
                assert worker.starting is not None
                worker.pid = wait(worker.starting, _START, tick, f"process {worker.number}")
            except Exception as error:  # noqa: BLE001 - it may have ended in any way
                missing[worker.number] = _why(error)
        return missing

    def time(self, worker: Worker, asked: Sequence[Asked], rounds: int, tick: Tick) -> tuple[list[Answer], str]:
        """The answer for each entry, or why there is none at all."""
        try:
            found = worker.call(self.patience, tick, time_entries, asked, rounds)
        except Exception as error:  # noqa: BLE001
            return [], _why(error)
        return (found, "") if len(found) == len(asked) else ([], "it answered something else")

    def release(self, tick: Tick) -> None:
        """Let the workers give back what an op took: the rank may need the memory for the next."""
        for worker in list(self.all):
            try:
                worker.call(self.patience, tick, release)
            except Exception as error:  # noqa: BLE001
                self.dismiss(worker.number, _why(error))

    def dismiss(self, number: int, why: str) -> None:
        """Do without a worker."""
        for worker in [one for one in self.all if one.number == number]:
            self.all.remove(worker)
            self.notes.append(f"compared without process {number}: {why}")
            worker.kill()


def _why(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def started(count: int, plan: Path, device: torch.device, patience: float) -> Iterator[Workers]:
    """Start the workers without waiting for them; end them on the way out."""
    os.environ.update(starter())
    found = Workers(wanted=count, patience=patience)
    try:
        for number in range(1, count + 1):
            pool = run.process_of_functions(_set_up, str(plan), str(device))
            found.all.append(Worker(number, pool, starting=pool.submit(os.getpid)))
        yield found
    finally:
        for worker in found.all:
            worker.kill()


# ── in the worker ──


@dataclass
class _State:
    plan: Plan
    device: torch.device
    tuner: ObservedTuner
    op: int = -1
    case: Case | None = None


_state: _State | None = None


def _set_up(place: str, device: str) -> None:
    """Set up as a rank does, without meeting anyone."""
    global _state  # noqa: PLW0603 - what a process of a pool keeps between two calls
    tie()  # a rank that is killed takes us along
    os.dup2(2, 1)  # what a library prints is no data
    hooks.at("worker_start")
    import torch

    from pipeline.tune import flashinfer_api
    from pipeline.tune.cpu_shim import CPU_KNOBS
    from pipeline.tune.planfile import read_plan
    from pipeline.tune.tuner import ObservedTuner

    on = torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    tuner = ObservedTuner(CPU_KNOBS if on.type == "cpu" else {})
    flashinfer_api.install(tuner)
    _state = _State(read_plan(Path(place)), on, tuner)


def time_entries(asked: Sequence[Asked], rounds: int) -> list[Answer]:
    """Time entries of one op. Raises `DeviceLost`, which breaks the pool, where nothing runs any more."""
    import torch

    from pipeline.tune.ops import spec_of

    from .timing import buffers_for, make_bench, nobody, time_benches

    assert _state is not None
    state, index = _state, asked[0][0][0]
    with torch.no_grad():
        if state.op != index:
            release()
            op = state.plan.ops[index]
            state.case, state.op = spec_of(op).make(op, state.device, state.plan.seed), index
        answers: list[Answer | None] = []
        benches, buffers = [], buffers_for(state.device)
        for key, candidates in asked:
            try:
                bench = make_bench(_points(state, key), _candidates(candidates), nobody, key[1], buffers)
            except Exception as error:  # noqa: BLE001 - an entry may fail in any way, such as for want of memory
                answers.append(_failed(error))
                continue
            number = next(iter(bench.failed), None)
            answers.append(None if number is None else Answer(error=bench.failed[number], failed=number))
            benches += [bench] * (number is None)
        try:
            timed = iter(time_benches(benches, [range(len(one.candidates)) for one in benches], rounds))
            found = [Answer(next(timed)) if one is None else one for one in answers]
        except Exception as error:  # noqa: BLE001
            found = [_failed(error) if one is None else one for one in answers]
        del benches, buffers
        _give_back(state.device)
    return found


def _failed(error: BaseException) -> Answer:
    from pipeline.tune.guard import survive

    from .timing import words

    survive(error)
    return Answer(error=words(error))


def _points(state: _State, key: Key) -> list[Any]:
    from .entries import entries_at

    op, bucket, place = key
    assert state.case is not None
    return entries_at(state.tuner, state.plan, state.plan.ops[op], state.case, bucket)[place]


def _candidates(asked: Sequence[tuple[int, Any]]) -> list[Candidate]:
    from pipeline.tune import flashinfer_api

    from .timing import Candidate

    return [Candidate(runner, flashinfer_api.tactic_of(tactic)) for runner, tactic in asked]


def release() -> None:
    """Give back what an op took."""
    if _state is not None:
        _state.op, _state.case = -1, None
        _give_back(_state.device)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        sys.modules["torch"].cuda.empty_cache()
