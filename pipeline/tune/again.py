"""Starting the ranks again after a tactic ended one of them, without that tactic.

A kernel that destroys the CUDA context, or ends its process, cannot be tried and left behind: everything that the
process holds is gone with it. The rank said what it was about to run; all ranks are ended and started again, leave that
tactic out at that bucket, and take up the ops that were finished. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import log

from .attempt import Crash, write_crashes
from .diagnose import RankCrashed
from .supervise import Crew, environment, supervise, torchrun

RESTARTS = 5  # of one tuning at most; each costs what starting the ranks costs, and the op that was being tuned


def until_none_crashes(crew: Crew, words: Sequence[str], state: Path | None, *, resume: bool) -> Path:
    """Run `pipeline.tune.worker` on every rank until it ends well; return the working directory of that run.

    `state` keeps finished ops between the runs; without one, a directory of our own does from the second run on.
    Raises what `supervise` raises; `RankCrashed` where the default itself ends a rank, where a tactic does that is
    left out already, and after RESTARTS.
    """
    crashes: list[Crash] = []
    for run in range(RESTARTS + 1):
        work = crew.work / f"run-{run}"
        work.mkdir()
        more = ["--work", str(work)]
        kept = state or (crew.work / "state" if run else None)
        if kept is not None:
            kept.mkdir(exist_ok=True)
            more += ["--state", str(kept)]
        if not resume and run == 0:
            more.append("--no-resume")
        if crashes:
            more += ["--crashed", str(write_crashes(work / "crashed.json", crashes))]
        command = torchrun(replace(crew, work=work), "pipeline.tune.worker", [*words, *more])
        try:
            supervise(replace(crew, work=work), [(command, environment(crew.work, crew.nodes))])
        except RankCrashed as error:
            known = {one.attempt.identity for one in crashes}
            crashes += [one for one in error.crashes if one.attempt.identity not in known]
            alone = crew.nodes.count == 1  # nodes that do not know of each other's crashes cannot start again together
            if (
                not alone
                or run == RESTARTS
                or len(crashes) == len(known)
                or any(one.attempt.tactic == -1 for one in crashes)
            ):
                raise
            for one in crashes[len(known) :]:
                log.warn(f"left out from now on: {one.told()}")
            log.note(f"starting the ranks again ({run + 1} of {RESTARTS} times at most)")
        else:
            return work
    raise AssertionError("the last run either returns or raises")
