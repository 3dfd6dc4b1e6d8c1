"""Starting the ranks again without a tactic that ended one of them, or that one did not come back from.

A kernel that destroys the CUDA context, ends its process or never ends itself cannot be tried and left behind:
everything that the process holds is gone with it. The rank said what it was about to run; all ranks are ended and
started again, leave that tactic out at that bucket, and take up the ops that were finished. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import log

from .attempt import Crash, write_crashes
from .supervise import Crew, environment, supervise, torchrun
from .troubles import RankHung, RankTrouble

RESTARTS = 5  # of one tuning at most; each costs what starting the ranks costs, and the op that was being tuned


def until_none_crashes(crew: Crew, words: Sequence[str], state: Path | None, *, resume: bool) -> Path:
    """Run `pipeline.tune.worker` on every rank until it ends well; return the working directory of that run.

    `state` keeps finished ops between the runs; without one, a directory of our own does.
    Raises what `supervise` raises, where no tactic is to blame, the default itself is, or one that is left out already,
    and after RESTARTS; `RankHung` where it is a rank that does not come back, whatever it runs.
    """
    crashes: list[Crash] = []
    stalled: dict[int, Crash] = {}
    alone = crew.nodes.count == 1  # nodes that do not know of each other's crashes cannot start again together
    for run in range(RESTARTS + 1):
        work = crew.work / f"run-{run}"
        work.mkdir()
        more = ["--work", str(work)]
        kept = state or (crew.work / "state" if alone else None)
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
        except RankTrouble as error:
            fresh = _to_leave_out(error, crashes)
            if not alone or run == RESTARTS or not fresh:
                raise
            _blame_rank(error, stalled)
            stalled |= {one.rank: one.crash for one in error.stalls}
            crashes += fresh
            for one in fresh:
                log.warn(f"left out from now on: {one.told()}")
            log.note(f"starting the ranks again ({run + 1} of {RESTARTS} times at most)")
        else:
            return work
    raise AssertionError("the last run either returns or raises")


def _to_leave_out(error: RankTrouble, known: Sequence[Crash]) -> list[Crash]:
    """The tactics to do without from now on; none where a default is among those to blame."""
    if any(one.attempt.tactic == -1 for one in error.crashes):
        return []
    left_out = {one.attempt.identity for one in known}
    return [one for one in error.crashes if one.attempt.identity not in left_out]


def _blame_rank(error: RankTrouble, stalled: Mapping[int, Crash]) -> None:
    """Raise `RankHung` for a rank that stood still before as well, with nothing to show that it is not to blame."""
    again = next((one for one in error.stalls if one.doubtful and one.rank in stalled), None)
    if again is None:
        return
    found = RankHung(
        f"rank {again.rank} made no progress in a second tactic, so the rank is to blame: "
        f"{again.crash.named()}; before in {stalled[again.rank].named()}",
        details=error.details,
        hint="nothing was saved; look at what that rank's device does; a longer --timeout helps only a slow rank",
    )
    found.states = error.states
    raise found from error
