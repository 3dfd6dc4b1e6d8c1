"""Ranks that are processes of the supervisor's own, as in a replay: how one ended is known without a launcher."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from pipeline.tune.supervise import Crew, environment, supervise
from pipeline.tune.troubles import RankLost

RANK = """
import os, sys, time
from pathlib import Path
from pipeline.tune.rank import live
rank, number = int(os.environ["RANK"]), int(sys.argv[2])

def body(steps):
    steps.say("replaying")
    if rank == 1:
        time.sleep(1)  # the other has started
        os.kill(os.getpid(), number)
    time.sleep(60)

os._exit(live(rank, Path(sys.argv[1]), body))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_that_ended_a_rank_is_named(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", RANK, str(tmp_path), str(int(number))]
    commands = [(words, {**environment(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    with pytest.raises(RankLost, match=f"rank 1 was ended by {number.name} at: replaying"):
        supervise(Crew(2, 30.0, tmp_path, launched=False), commands)
