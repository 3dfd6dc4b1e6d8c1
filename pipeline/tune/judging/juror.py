"""A juror: a process beside a rank, on the same device, that times what it is asked to and decides nothing.

    python -m pipeline.tune.judging.juror PLAN DEVICE     started by a rank (see `jury`), never by hand

Reads one request a line from stdin and answers each with one line on stdout, both JSON. It answers for each key by
itself: with its rounds, or with why it has none, so that a key which cannot be timed here costs no other key anything.
Where a process's memory lies, and so how fast some kernels run in it, is settled when it starts; sittings in several
processes show what sittings in one cannot.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pipeline.tune import flashinfer_api
from pipeline.tune.cpu_shim import CPU_KNOBS
from pipeline.tune.guard import OUT_OF_MEMORY, survive
from pipeline.tune.ops import adapter_of
from pipeline.tune.planfile import read_plan
from pipeline.tune.tied import tie
from pipeline.tune.tuner import ObservedTuner, Question

from .bench import Bench, Candidate, Untold, words
from .benches import bench, copies_for, rounds
from .cold import Copies
from .questions import Key, questions

if TYPE_CHECKING:
    from pipeline.contract.plan import Plan
    from pipeline.tune.ops import Case

READY, RELEASE = "ready", "release"
HEARD, ROUNDS, ERROR = "heard", "rounds", "error"  # of each key: its rounds, or an error; of the whole, an error alone
FAILED = "failed"  # beside a key's error: the place of the candidate that failed

T = TypeVar("T")
Trial = tuple[Bench, Sequence[int]]  # a bench, and which of its candidates are timed
Unable = dict[str, Any]  # what is answered for a key that is not timed; empty for others


@dataclass
class Juror:
    """The op whose inputs are held, the keys that were asked for last, and their benches.

    The benches of some keys are kept until others are asked for: what is freed would be handed out again, and the next
    sitting would lie where this one lay.
    """

    plan: Plan
    device: torch.device
    tuner: ObservedTuner
    op: int = -1
    case: Case | None = None
    asked: set[Key] = field(default_factory=set)
    points: dict[Key, list[Question]] = field(default_factory=dict)
    benches: list[Bench] = field(default_factory=list)

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One sitting: `rounds` of the candidates of each key, each as (place of the runner, tactic), at the entry's
        counts.

        The answer holds, for each key, the natural logarithms of milliseconds by place of the candidate, or why there
        are none. Asked to release, it gives the memory back instead. Raises `DeviceLost`.
        """
        if asked.get(RELEASE):
            self._drop()
            return {RELEASE: True}
        keys: list[Key] = [
            (int(op), int(bucket), int(entry)) for op, bucket, entry in (one["key"] for one in asked["keys"])
        ]
        made = self._trials(keys, asked["keys"])
        if any(unable for _, unable in made):
            self._spare()
        trials = [trial for trial, _ in made if trial is not None]
        self.benches += [trial for trial, _ in trials]
        timed = iter(_timed(trials, int(asked["rounds"])))
        return {HEARD: [next(timed) if trial else unable for trial, unable in made]}

    def _trials(self, keys: Sequence[Key], asked: Sequence[Mapping[str, Any]]) -> list[tuple[Trial | None, Unable]]:
        """What is timed of each key, or why nothing is."""
        _, why = _tried(lambda: self._hold(keys))
        if why:
            return [(None, {ERROR: why})] * len(keys)
        copies = copies_for(self.device)
        return [self._trial(key, one["candidates"], copies) for key, one in zip(keys, asked, strict=True)]

    def _hold(self, keys: Sequence[Key]) -> None:
        """Hold the inputs of these keys' op; less than was asked for already is no change."""
        if self.asked.issuperset(keys):
            return
        self.benches.clear()
        self.points.clear()
        op = keys[0][0]
        if self.op != op or self.case is None:
            self._drop()
            planned = self.plan.ops[op]
            self.case = adapter_of(planned).make(planned, self.device, self.plan.seed)
            self.op = op
        self.asked = set(keys)

    def _trial(
        self, key: Key, candidates: Sequence[tuple[int, Any]], copies: Copies | None
    ) -> tuple[Trial | None, Unable]:
        """A bench of a key's candidates, all of which run, or why there is none."""
        wanted = [Candidate(int(runner), flashinfer_api.tactic_of(tactic)) for runner, tactic in candidates]

        def make() -> Bench:
            return bench(self._points(key), wanted, self.device, Untold(), key[1], copies=copies)

        made, why = _tried(make)
        if made is None:
            return None, {ERROR: why}
        if not made.failed:
            return (made, range(len(wanted))), {}
        number, why = next(iter(made.failed.items()))
        runner = type(self.points[key][0].runners[wanted[number].runner]).__name__
        tactic = flashinfer_api.tactic_json(wanted[number].tactic)
        return None, {ERROR: f"{runner} tactic {tactic}: {why}", FAILED: number}

    def _points(self, key: Key) -> list[Question]:
        """The counts that a key's entry answers, found once for all entries of its bucket."""
        op, bucket, _ = key
        if key not in self.points:
            assert self.case is not None
            found = questions(self.tuner, self.plan, self.plan.ops[op], self.case, bucket)
            self.points |= {(op, bucket, entry): points for entry, points in enumerate(found)}
        return self.points[key]

    def _drop(self) -> None:
        """Give the memory back that an op's inputs took."""
        self.op, self.case = -1, None
        self.asked.clear()
        self.points.clear()
        self.benches.clear()
        self._spare()

    def _spare(self) -> None:
        """Leave what is not held to the other processes on the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """What is made, or why it cannot be. Raises `DeviceLost` where nothing can be run any more."""
    try:
        return make(), ""
    except OUT_OF_MEMORY as error:
        return None, words(error)
    except Exception as error:  # noqa: BLE001 - a key may fail in any way
        survive(error)
        return None, words(error)


def _timed(trials: Sequence[Trial], count: int) -> list[dict[str, Any]]:
    """The rounds of each, timed in one go; each alone where that fails, so that only those fail that do so alone."""
    told, why = _tried(lambda: rounds(trials, count)) if trials else ([], "")
    if told is not None:
        return [{ROUNDS: [[[*times] for _, times in sorted(one.items())] for one in mine]} for mine in told]
    if len(trials) == 1:
        return [{ERROR: why}]
    return [_timed([trial], count)[0] for trial in trials]


def serve(juror: Juror, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer until stdin ends. What a request raises is its answer; `DeviceLost` ends the process."""
    say({READY: True})
    for line in sys.stdin:
        try:
            with torch.no_grad():
                answer = juror.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the rank goes on without this sitting
            answer = {ERROR: words(error)}
        say(answer)


def main(place: str, device: str) -> None:
    """Set up as a rank does, without meeting anyone."""
    tie()  # a rank that is killed takes us along
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no answer
    plan, on = read_plan(Path(place)), torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    tuner = ObservedTuner(CPU_KNOBS if on.type == "cpu" else {})
    flashinfer_api.install(tuner)

    def say(answer: Mapping[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    serve(Juror(plan, on, tuner), say)


if __name__ == "__main__":
    main(*sys.argv[1:3])
