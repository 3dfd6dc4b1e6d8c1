"""Running a command several times and keeping what the kernel says of each run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """Wall seconds and seconds of processors of each run in order, and the largest resident size of any in bytes."""

    seconds: tuple[float, ...]
    processors: tuple[float, ...]
    peak: int

    def __str__(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        return (
            f"{statistics.median(self.seconds):.3f} s (min {low:.3f}, max {high:.3f}, n={len(self.seconds)}), "
            f"processors {statistics.median(self.processors):.3f} s, peak {self.peak / 1e6:.0f} MB"
        )


def once(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[float, float, int]:
    """Run a command to its end; seconds by the wall and of processors, and its largest resident size in bytes.

    The seconds of processors are those of all processes that were waited for together. A failure ends the bench.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode not in (0, 3):
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{said[-2000:]}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def alternate(commands: Sequence[Sequence[str]], runs: int, env: Mapping[str, str] | None = None) -> list[Figures]:
    """Figures of each command, run in turn, so that a busy machine hits all of them."""
    found = [[once(command, env) for command in commands] for _ in range(runs)]
    columns = [list(zip(*one, strict=True)) for one in zip(*found, strict=True)]
    return [Figures(seconds, processors, max(peaks)) for seconds, processors, peaks in columns]


def many(command: Sequence[str], runs: int = 7) -> Figures:
    """One run that is not counted, then `runs` that are."""
    once(command)
    return alternate([command], runs)[0]


def say(name: str, value: object) -> None:
    """One line of the result."""
    print(f"{name:<64} {value}", flush=True)
