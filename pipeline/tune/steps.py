"""Where each rank is: one small JSON file per rank, written through a memory map.

Storing into the map is no system call, so a rank can say its step before every measurement, and what it said
survives it whatever ends it. The supervisor reads the same files. Times are `time.monotonic`, one clock for all
processes of a host.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .attempt import Attempt
from .processes import letter_of, start_time

_SIZE = 8192  # bytes of a step file; the JSON is padded with spaces
_TEXT = 300  # characters kept of a text: six bytes each at worst, so that the JSON always fits


@dataclass(frozen=True)
class RankStep:
    """A rank's last step.

    `state` is `running`, `done` or `failed`. `waiting` says that the rank is inside a collective and can only go on
    when the others arrive; `collective` counts the collectives entered so far. `op` counts from 1, 0 before the
    first; `begun` says that all ranks have met, and that silence counts from now on. `trying` is the tactic that is
    run at the moment; `returned` counts how often one came back before that, defaults and what a cache answered
    apart. `changed` is when any of this last changed, `started` the kernel's start time of the process, which tells
    the process from a later one with the same pid.
    """

    rank: int
    pid: int
    started: str
    state: str = "running"
    step: str = ""
    detail: str = ""
    op: int = 0
    begun: bool = False
    waiting: bool = False
    collective: int = 0
    trying: dict[str, Any] | None = None
    returned: int = 0
    changed: float = 0.0

    def told(self) -> str:
        """The step in words."""
        text = f"{self.step}, {self.detail}" if self.detail else self.step
        return f"{text} (waiting for the other ranks)" if self.waiting else text


class Steps:
    """The writing side, in a rank. `path` is created whole before anything is written to it."""

    def __init__(self, path: Path, rank: int) -> None:
        path.write_bytes(b" " * _SIZE)
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), _SIZE)
        self._length = 0
        self._now = RankStep(rank, os.getpid(), start_time(os.getpid()))
        self.say("starting")

    @property
    def now(self) -> RankStep:
        """What was written last."""
        return self._now

    def say(self, step: str, detail: str = "", *, op: int | None = None) -> None:
        """Begin a step."""
        self._write(step=step[:_TEXT], detail=detail[:_TEXT], op=self._now.op if op is None else op, trying=None)

    def begin(self) -> None:
        """Say that importing and meeting are over, which have a bound of their own."""
        self._write(begun=True)

    def tick(self, detail: str) -> None:
        """Say what is going on inside the step; proves that the rank is alive."""
        self._write(detail=detail[:_TEXT])

    def attempt(self, attempt: Attempt | None, detail: str = "") -> None:
        """Say which tactic is run now, before it is; None when it has been, and this process still is there."""
        before = self._now.trying
        if attempt is not None or before is not None:
            changes: dict[str, Any] = {"detail": detail[:_TEXT]} if detail else {}
            if before is not None and not before["entry"] and before["tactic"] != -1:
                changes["returned"] = self._now.returned + 1
            self._write(trying=None if attempt is None else attempt.fits, **changes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a collective: inside it the rank depends on the others. After an exception the mark stays."""
        self._write(waiting=True, collective=self._now.collective + 1)
        yield
        self._write(waiting=False)

    def end(self, state: str) -> None:
        """Say that the rank is `done` or `failed`."""
        self._write(state=state)

    def _write(self, **changes: Any) -> None:  # noqa: ANN401 - fields of RankStep
        self._now = replace(self._now, changed=time.monotonic(), **changes)
        # `asdict` would copy all, which takes longer than everything else here.
        self._store(_json(vars(self._now)))

    def _store(self, text: bytes) -> None:
        text = text[:_SIZE]
        size = max(len(text), self._length)  # what the last text left behind this one is blanked
        self._map[:size] = text.ljust(size)
        self._length = len(text)


def _json(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode(errors="replace")


def step_path(work: Path, rank: int) -> Path:
    """The step file of a rank."""
    return work / f"rank-{rank}.step.json"


def read_step(work: Path, rank: int) -> RankStep | None:
    """A rank's last step, or None where it has said nothing yet. A torn read is read again."""
    for _ in range(5):
        try:
            return RankStep(**json.loads(step_path(work, rank).read_bytes()))
        except (OSError, ValueError, TypeError):
            time.sleep(0.002)
    return None


def alive(step: RankStep) -> bool:
    """Whether the process that wrote this step still runs."""
    return bool(state_of(step))


def state_of(step: RankStep | None) -> str:
    """The kernel's letter for the process that wrote this step, or empty where it no longer runs."""
    return letter_of(step.pid, step.started) if step is not None else ""
