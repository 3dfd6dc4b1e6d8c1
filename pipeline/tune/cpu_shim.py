"""What lets FlashInfer's AutoTuner measure on a CPU: its clock, streams, graphs and delay kernel replaced, no more.

Everything else is FlashInfer's own: profiles, keys, candidates, the timing loop, the reduction over ranks, the choice,
saving, loading and looking up. A cache made this way is for the machine's CPU alone; its architecture is `cpu-…`,
and its manifest carries `SUBSTITUTIONS`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import flashinfer_api

# Runs of a tactic before the clock starts, and timed runs; no delay before a launch that is none.
CPU_KNOBS = {"warmup": 2, "repeat": 5, "stream_delay_micro_secs": 0}


class _Stream:
    """A stream that never has work left: a CPU op has finished when its call returns."""

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class _Event:
    """A stamp of the wall clock."""

    def __init__(self, *_: object, **__: object) -> None:
        self.stamp = 0

    def record(self, *_: object) -> None:
        self.stamp = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        """Whether it has been reached: always."""
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this stamp to `end`."""
        return (end.stamp - self.stamp) / 1e6


class _Graph:
    """Made before every measurement, used only by ops that ask for graphs."""

    def replay(self) -> None:
        raise RuntimeError("a CPU op cannot be replayed as a CUDA graph")


@dataclass(frozen=True)
class _Row:
    owner: str  # "torch.cuda", or FlashInfer's autotuner module
    names: tuple[str, ...]
    replacement: Any
    sentence: str


def _idle(*_: object, **__: object) -> _Stream:
    return _Stream()


def _nothing(*_: object, **__: object) -> None:
    return None


def _no(*_: object, **__: object) -> bool:
    return False


def _no_stream(*_: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


_TABLE = (
    _Row("torch.cuda", ("Event",), _Event, "stamps of time.perf_counter_ns: wall-clock time, not GPU time"),
    _Row("torch.cuda", ("current_stream",), _idle, "a stream that is always idle, since a CPU op blocks its caller"),
    _Row("torch.cuda", ("stream",), _no_stream, "a context that does nothing"),
    _Row("torch.cuda", ("CUDAGraph",), _Graph, "an object that refuses to be replayed; nothing is measured as a graph"),
    _Row("torch.cuda", ("is_current_stream_capturing",), _no, "always false"),
    _Row("autotuner", ("delay_kernel", "get_trtllm_utils_module"), _nothing, "nothing, there is no launch to hide"),
)

# As much of torch.cuda as candidates are compared with. Without CUDAGraph: calls that block need none.
CPU_CUDA = SimpleNamespace(
    Event=_Event,
    synchronize=_nothing,
    empty_cache=_nothing,
    get_device_properties=lambda _: SimpleNamespace(
        L2_cache_size=1 << 20, total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
)

SUBSTITUTIONS: tuple[str, ...] = (
    *(f"{' and '.join(f'{row.owner}.{name}' for name in row.names)}: {row.sentence}" for row in _TABLE),
    f"AutoTuner({', '.join(f'{k}={v}' for k, v in CPU_KNOBS.items())}): fewer runs than on a GPU, and no delay",
    "cold-L2 buffers and CUDA graphs: off",
)


@contextlib.contextmanager
def cpu_clock() -> Iterator[None]:
    """Put the substitutions in place, and everything back on the way out."""
    owners = {"torch.cuda": torch.cuda, "autotuner": flashinfer_api.load()}
    saved: list[tuple[Any, str, Any]] = []
    try:
        for row in _TABLE:
            owner = owners[row.owner]
            for name in row.names:
                if hasattr(owner, name):  # FlashInfer 0.6 has no get_trtllm_utils_module
                    saved.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, row.replacement)
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)
