"""Arguments and exit codes of the tuner: `python -m pipeline.tune plan.json OUT`.

With `--keep-failure`, as the host runs it, a failure is written to OUT/failure.json and the exit code is 0: any other
code says that the container itself was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from pipeline import log
from pipeline.contract.errors import Exit, PipelineError, UsageError
from pipeline.contract.files import write_json
from pipeline.contract.places import FAILURE_FILE
from pipeline.flashinfer.ops import check_leader

from .arguments import need_torch, parser, read_plan
from .checkpoint import open_state
from .compare.decide import SECONDS as COMPARE_SECONDS
from .failures import RankTrouble
from .publish import finish, open_out
from .steps import RankStep
from .supervisor import Launch, Nodes, run_with_restarts, temporary


class Unsaid(UsageError):
    """The result cannot be written to stdout."""


def _tune(arguments: argparse.Namespace) -> dict[str, object]:
    plan = read_plan(arguments.plan)
    check_leader(arguments.strategy, plan)  # before any rank is started: a rank needs long to import
    world = plan.layout.world
    if not plan.ops:
        raise UsageError(
            f"the plan of {plan.model} tunes nothing",
            details=[f"{one.name}: {one.reason}" for one in plan.untuned],
            hint="nothing to do for this model on this device",
        )
    nodes = Nodes(arguments.nnodes, arguments.node_rank, arguments.rdzv_endpoint)
    local = _ranks_here(nodes, world)
    need_torch()
    buckets = sum(len(op.buckets) for op in plan.ops)
    log.note(f"{plan.model}: {len(plan.ops)} ops, {buckets} buckets, {world} ranks on {plan.device} ({plan.arch})")
    if arguments.compare == "on":
        seconds = COMPARE_SECONDS if arguments.compare_budget is None else arguments.compare_budget
        log.note(f"comparing takes {seconds * buckets:.0f} s at most; what is not compared by then keeps the default")

    def tell(step: RankStep) -> None:  # the host reads "k/n …" (`_OP` in image/tuner.py)
        log.note(f"{step.op}/{len(plan.ops)} {step.step}" if step.step.startswith("tuning") else step.step)

    options: dict[str, object] = {  # of `session.Options` all but work, state and crashes
        name: getattr(arguments, name)
        for name in ("timeout", "compare", "compare_budget", "second_process", "strategy")
    }
    options["endpoint"] = nodes.endpoint if nodes.count > 1 else ""
    for name in ("plan", "previous"):
        place = getattr(arguments, name)
        options[name] = None if place is None else str(place.resolve())
    state = None if arguments.state is None else open_state(arguments.state)
    with temporary() as work, log.step(f"tune on {world} ranks"):
        launch = Launch(local, arguments.timeout, work, tell, tuple(op.name for op in plan.ops), nodes)
        try:
            last = run_with_restarts(launch, options, state)
        except PipelineError as error:
            error.log = _keep_log(work, arguments.out)
            raise
        if nodes.rank != 0:
            log.note("tuned; the first node saves the cache")
            return {}
        for number in (signal.SIGINT, signal.SIGTERM):  # it is saved from here on: an interrupt comes too late
            signal.signal(number, signal.SIG_IGN)
        return finish(arguments.out.resolve(), last, state)


def _ranks_here(nodes: Nodes, world: int) -> int:
    """How many of the ranks run on this node; raise `UsageError` unless they can be shared out."""
    if nodes.count == 1 and nodes.rank == 0:
        return world
    if nodes.count < 1 or not 0 <= nodes.rank < nodes.count:
        raise UsageError(f"--node-rank {nodes.rank} of --nnodes {nodes.count}", hint="nodes count from 0")
    if world % nodes.count:
        raise UsageError(f"{world} ranks cannot be shared out over {nodes.count} nodes", hint="as many ranks on each")
    place = re.fullmatch(r"\S+:([0-9]{1,5})", nodes.endpoint, re.ASCII)
    if place is None or not 0 < int(place[1]) < 1 << 16:
        raise UsageError(
            f"--rdzv-endpoint {nodes.endpoint!r} names no place where {nodes.count} nodes could meet",
            hint="HOST:PORT: an address of node 0 that all nodes reach, and a free port",
        )
    return world // nodes.count


def _keep_log(work: Path, out: Path) -> str:
    """Put what the ranks of the last run printed beside where the cache would be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (*_, path) = sorted(work.glob("run-*/ranks.log"))
        return str(shutil.copyfile(path, out / "ranks.log"))
    except (OSError, ValueError):
        return ""


def _say(told: dict[str, object]) -> None:
    notes, substitutions = told["notes"], told["substitutions"]
    assert isinstance(notes, list) and isinstance(substitutions, list)
    for note in notes:
        log.note(str(note))
    if substitutions:
        log.warn("tuned on a CPU with FlashInfer's AutoTuner shimmed; this cache says nothing about any GPU:")
        for line in substitutions:
            log.note(f"  {line}")
    print(json.dumps(told), flush=True)  # noqa: T201 - data


def main(words: list[str] | None = None) -> int:
    """Tune, and turn errors into exit codes or into failure.json."""

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        arguments = parser().parse_args(words)
        open_out(arguments.out)
    except PipelineError as error:  # no place for failure.json either
        log.fail(error)
        return int(error.exit_code)
    try:
        told = _tune(arguments)
    except PipelineError as error:
        log.fail(error)
        if not arguments.keep_failure:
            return int(error.exit_code)
        ranks = [state.to_json() for state in error.states] if isinstance(error, RankTrouble) else []
        write_json(
            arguments.out / FAILURE_FILE,
            {
                "exit_code": int(error.exit_code),
                "message": error.message,
                "hint": error.hint,
                "details": list(error.details),
                "ranks": ranks,
            },
        )
        return int(Exit.OK)
    except KeyboardInterrupt:
        kept = f"; --state {arguments.state} keeps the finished ops" if arguments.state is not None else ""
        log.note(f"interrupted; nothing was saved{kept}")
        return int(Exit.INTERRUPTED)
    if told:
        try:
            _say(told)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where what is buffered can go
            if not isinstance(error, BrokenPipeError):  # whose reader wants no more
                log.fail(Unsaid(f"stdout: {error.strerror}", hint=f"only that is lost: {told['path']} is in place"))
                return int(Exit.USAGE)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
