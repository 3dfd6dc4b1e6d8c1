"""The rank's side of its jurors: starting them, asking one at a time, doing without one that fails.

    rank ── stdin, stdout ── juror 1 … juror N        on the rank's own device, one at work at a time

A juror only ever lends its process to a sitting, and answers for each key by itself. One that ends, answers with
something else or not in time is left out for the rest of the op, on all ranks alike, and started again before the next
one; a second time it is left out for good. The manifest says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from pipeline import run
from pipeline.tune import flashinfer_api
from pipeline.tune.tied import starter

from . import rule
from .bench import Candidate
from .juror import ERROR, FAILED, HEARD, READY, RELEASE, ROUNDS
from .questions import Key

GPU_JURORS = 3  # with the rank itself four processes: as many as a decision needs sittings
_START = 180.0  # seconds for a juror to import and to take its device, on a machine that compiles meanwhile
_BEAT = 1.0
_ENDED = ""
_NONSENSE = "it said something else"

Tick = Callable[[str], None]
Asked = tuple[Key, Sequence[Candidate], int]  # a key, its candidates, how many times each has in a round
Answer = tuple[list[rule.Round], str, int]  # of one key: its rounds, or why there are none, and who failed where not 0


class Process(Protocol):
    """What `pipeline.run.spawn` yields, as far as it is needed here."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class Juror:
    """One process, and the lines that it has said."""

    number: int
    process: Process
    stdin: IO[str]
    lines: queue.Queue[str]
    used: bool = False  # since it last gave its memory back

    def ask(self, request: dict[str, Any]) -> None:
        """Send one request; a process that is gone answers by its silence."""
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(json.dumps(request) + "\n")
            self.stdin.flush()

    def wait(self, seconds: float, tick: Tick) -> dict[str, Any]:
        """Its next answer; `error` in it where there is none in time."""
        return self.wait_until(time.monotonic() + seconds, seconds, tick)

    def wait_until(self, deadline: float, seconds: float, tick: Tick) -> dict[str, Any]:
        """The same, of `seconds` that may have begun before."""
        while True:
            tick(f"juror {self.number}")
            try:
                line = self.lines.get(timeout=max(0.01, min(_BEAT, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                return {ERROR: f"no answer within {seconds:.0f} s"}
            if line == _ENDED:
                return {ERROR: "its process ended"}
            try:
                answer = json.loads(line)
            except ValueError:
                return {ERROR: f"not understood: {line[:100]!r}"}
            return answer if isinstance(answer, dict) else {ERROR: f"not understood: {line[:100]!r}"}


@dataclass
class Jury:
    """The jurors of one rank, and how one is started.

    `patience` bounds one sitting, in seconds: less than the ranks wait for each other. `lost` are those that were
    dismissed and may be started again, `again` those that were.
    """

    start: Callable[[int], Juror] | None = None
    jurors: dict[int, Juror] = field(default_factory=dict)
    patience: float = 60.0
    notes: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    def ready(self, tick: Tick) -> dict[int, str]:
        """Wait until all have started; why those that did not have not, by number."""
        return self._unheard(READY, self.jurors, _START, tick)

    def _unheard(self, word: str, numbers: Collection[int], seconds: float, tick: Tick) -> dict[int, str]:
        """Which of these do not say `word` within so many seconds for all together, and why."""
        deadline = time.monotonic() + seconds
        answers = {number: self.jurors[number].wait_until(deadline, seconds, tick) for number in numbers}
        return {number: str(answer.get(ERROR, _NONSENSE)) for number, answer in answers.items() if not answer.get(word)}

    def sit(self, number: int, keys: Sequence[Asked], count: int, tick: Tick) -> tuple[list[Answer], str]:
        """`count` rounds of the candidates of each key in the process of a juror; why it gave no answer."""
        wanted = [
            {"key": key, "candidates": [[one.runner, flashinfer_api.tactic_json(one.tactic)] for one in candidates]}
            for key, candidates, _ in keys
        ]
        juror = self.jurors[number]
        juror.used = True
        juror.ask({"keys": wanted, "rounds": count})
        answer = juror.wait(self.patience, tick)
        if ERROR in answer:
            return [], str(answer[ERROR])
        told = _understood(answer.get(HEARD), [[times] * len(candidates) for _, candidates, times in keys], count)
        return (told, "") if told else ([], _NONSENSE)

    def revive(self, tick: Tick) -> None:
        """Start those again, once, that were lost while they judged, and wait for them.

        For between two ops: nothing may be timed while they start.
        """
        fresh, self.lost = sorted(self.lost), set()
        if self.start is None:
            return
        for number in fresh:
            self.again.add(number)
            self.jurors[number] = self.start(number)
        missing = self._unheard(READY, fresh, self.patience, tick)
        for number in fresh:
            if number in missing:
                self.dismiss(number, f"it did not start again: {missing[number]}")
            else:
                self.notes.append(f"juror {number} was started again")

    def dismiss(self, number: int, why: str, *, for_good: bool = False) -> None:
        """Do without a juror: until it is started again, or `for_good`, as whenever it was already."""
        if not for_good and number in self.jurors and number not in self.again:
            self.lost.add(number)
        juror = self.jurors.pop(number, None)
        if juror is not None:
            self.notes.append(f"judging went on without juror {number}: {why}")
            juror.process.kill()  # whatever it still runs would disturb the others

    def release(self, tick: Tick) -> None:
        """Let the jurors give back what an op took: the rank may need the memory for the next."""
        used = [number for number, juror in self.jurors.items() if juror.used]
        for number in used:
            self.jurors[number].used = False
            self.jurors[number].ask({RELEASE: True})
        for number, why in self._unheard(RELEASE, used, self.patience, tick).items():
            self.dismiss(number, why)


@contextlib.contextmanager
def convened(count: int, plan: Path, device: torch.device, patience: float) -> Iterator[Jury]:
    """Start the jurors, without waiting for them; end them on the way out."""
    command = [sys.executable, "-m", "pipeline.tune.judging.juror", str(plan.resolve()), str(device)]
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Juror:
            process = stack.enter_context(
                run.spawn(command, env={**os.environ, **starter()}, stdin=run.PIPE, stdout=run.PIPE)
            )
            assert process.stdin is not None and process.stdout is not None
            stack.callback(run.close, process.stdin)  # it may be gone with something still unread there
            return Juror(number, process, process.stdin, _follow(process.stdout))

        yield Jury(start, {number: start(number) for number in range(1, count + 1)}, patience)


def _understood(said: Any, shapes: Sequence[Sequence[int]], count: int) -> list[Answer]:  # noqa: ANN401 - read from JSON
    """For each key `count` rounds, each of so many times for each candidate, or why not; nothing where something else
    was said.
    """
    try:
        return [_answer(one, shape, count) for one, shape in zip(said, shapes, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _answer(said: Mapping[str, Any], shape: Sequence[int], count: int) -> Answer:
    """What was said for one key. Raises `ValueError` and others where it is something else."""
    if said.get(ERROR):
        failed = said.get(FAILED, 0)
        if failed not in range(len(shape)):
            raise ValueError(_NONSENSE)
        return [], str(said[ERROR]), int(failed)
    told: list[rule.Round] = [{c: tuple(map(float, times)) for c, times in enumerate(one)} for one in said[ROUNDS]]
    if [[len(times) for times in one.values()] for one in told] != [shape] * count:
        raise ValueError(_NONSENSE)
    return told, "", 0


def _follow(stream: IO[str]) -> queue.Queue[str]:
    """The lines of a stream as they come; an empty one when it ends."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError), stream:
            for line in stream:
                lines.put(line)
        lines.put(_ENDED)

    threading.Thread(target=read, daemon=True).start()
    return lines
