"""A juror: a process beside a rank, on the same device, that times what it is asked to and decides nothing.

    python -m pipeline.tune.judging.juror PLAN DEVICE     started by a rank (see `jury`), never by hand

Reads one request a line from stdin and answers each with one line on stdout, both JSON. Where a process's memory lies,
and so how fast some kernels run in it, is settled when it starts; sittings in several processes show what sittings in
one cannot.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.tune import flashinfer_api
from pipeline.tune.cpu_shim import CPU_KNOBS
from pipeline.tune.ops import adapter_of
from pipeline.tune.planfile import read_plan
from pipeline.tune.tied import tie
from pipeline.tune.tuner import ObservedTuner, Question

from .bench import Bench, Candidate, Untold
from .benches import bench, copies_for, rounds
from .questions import Key, questions

if TYPE_CHECKING:
    from pipeline.contract.plan import Plan
    from pipeline.tune.ops import Case

READY, RELEASE = "ready", "release"


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
    points: dict[Key, list[Question]] = field(default_factory=dict)
    benches: list[Bench] = field(default_factory=list)

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One sitting: `rounds` of the candidates of each key, each as (place of the runner, tactic), at the entry's
        counts.

        The answer holds, for each key, the natural logarithms of milliseconds by place of the candidate. Asked to
        release, it gives the memory back instead.
        """
        if asked.get(RELEASE):
            self._drop()
            return {RELEASE: True}
        keys: list[Key] = [
            (int(op), int(bucket), int(entry)) for op, bucket, entry in (one["key"] for one in asked["keys"])
        ]
        self._take(keys)
        copies, trials = copies_for(self.device), []
        for key, one in zip(keys, asked["keys"], strict=True):
            wanted = [Candidate(int(r), flashinfer_api.tactic_of(tactic)) for r, tactic in one["candidates"]]
            trial = bench(self.points[key], wanted, self.device, Untold(), key[1], copies=copies)
            if trial.failed:
                number, why = next(iter(trial.failed.items()))
                return {"error": f"candidate {number} failed: {why}"}
            trials.append((trial, list(range(len(wanted)))))
        self.benches += [trial for trial, _ in trials]
        told = rounds(trials, int(asked["rounds"]))
        return {"rounds": [[[[*times] for _, times in sorted(one.items())] for one in mine] for mine in told]}

    def _take(self, keys: Sequence[Key]) -> None:
        """Hold what these keys of one op need; less than is held already is no change."""
        if all(key in self.points for key in keys):
            return
        self.benches.clear()
        self.points.clear()
        op = keys[0][0]
        planned = self.plan.ops[op]
        if self.op != op or self.case is None:
            self._drop()
            self.case = adapter_of(planned).make(planned, self.device, self.plan.seed)
            self.op = op
        for bucket in sorted({bucket for _, bucket, _ in keys}):
            for entry, points in enumerate(questions(self.tuner, self.plan, planned, self.case, bucket)):
                self.points[op, bucket, entry] = points

    def _drop(self) -> None:
        """Give the memory back that an op's inputs took."""
        self.op, self.case = -1, None
        self.points.clear()
        self.benches.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def serve(juror: Juror, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer until stdin ends. What a request raises is its answer."""
    say({READY: True})
    for line in sys.stdin:
        try:
            with torch.no_grad():
                answer = juror.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the rank goes on without this sitting
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
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
