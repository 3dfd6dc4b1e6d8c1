"""One rank: `python -m pipeline.tune.worker WORK`, started by the supervisor, never by hand.

begin (agree on everything, load what is known) → tune each op → gather, and check that the ranks agree → rank 0
saves → every rank loads what was saved and finds each bucket's entry in it → rank 0 describes it. The supervisor puts
it in place, once every rank has ended well.

A rank that fails writes down why and then waits for a moment: the supervisor sees the file, asks every other rank for
its stack while it still is where it was, and ends them all. Only the standard library is imported before a rank has
said that it is there, so that even an import that hangs is seen.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline.contract.errors import Exit
from pipeline.contract.files import write_json

from . import hooks
from .failures import describe, failure_path
from .steps import Steps, die_with_parent, stack_path, step_path

_FAREWELL_SECONDS = 30.0  # how long a failed rank waits to be ended by its supervisor
_RESERVE = 16 << 10  # bytes kept for a rank's failure, so that it can be written on a full disk too
_ANSWER_SECONDS = 60.0  # seconds that the second process may take for one answer, inputs and all


def live(rank: int, work: Path, body: Callable[[Steps], None]) -> int:
    """Run a rank's work and return its exit code. Ends with its parent; writes its stack on SIGUSR1.

    The caller ends the process with `os._exit`: torch's and gloo's own shutdown can wait for a rank that is gone.
    """
    die_with_parent()
    hooks.at("started")
    reserve = work / f"rank-{rank}.reserve"
    with stack_path(work, rank).open("w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        steps = Steps(step_path(work, rank), rank)
        try:
            reserve.write_bytes(b" " * _RESERVE)
            steps.say("importing torch and FlashInfer")
            hooks.at("importing")
            body(steps)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear of it
            failure = describe(rank, error, steps.now.told())
        else:
            steps.end("done")
            return int(Exit.OK)
        steps.end("failed")
        reserve.unlink(missing_ok=True)
        write_json(failure_path(work, rank), asdict(failure))
        time.sleep(_FAREWELL_SECONDS)
        return failure.exit_code


def tune_rank(run_folder: Path, steps: Steps) -> None:
    """Everything that a rank which tunes does; `run_folder` holds its options."""
    from .compare.second import started
    from .finalize import check_saved, describe_result, gather_entries
    from .jit import prebuild
    from .session import begin, read_options
    from .tune_op import tune

    session = begin(read_options(run_folder), steps)
    options = session.options
    answer_seconds = min(_ANSWER_SECONDS, options.timeout / 2)
    with started(options.second_process == "on", options.plan, session.device, answer_seconds) as session.second:
        prebuild(session)
        session.second.meet(session.ranks)
        tune(session)
    owners = gather_entries(session)
    saved, covered = check_saved(session)
    if session.ranks.rank == 0:
        steps.say("writing the manifest")
        describe_result(session, saved, owners, covered)
    session.ranks.barrier()
    hooks.at("done")


def main(words: list[str]) -> int:
    """Live as a rank that tunes."""
    run_folder = Path(words[0])
    return live(int(os.environ["RANK"]), run_folder, lambda steps: tune_rank(run_folder, steps))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
