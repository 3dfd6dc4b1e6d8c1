"""Ranks that are processes of the supervisor's own, as in a replay: how one ended is known without a launcher."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from pipeline.tune.supervise import Crew, environment, supervise
from pipeline.tune.troubles import RankBroken, RankLost

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


WITH_THREADS = """
import os, sys, threading, time
from pathlib import Path
from pipeline.tune.rank import live
rank, work = int(os.environ["RANK"]), Path(sys.argv[1])

def working():
    (work / "there").touch()
    time.sleep(60)

def body(steps):
    steps.say("tuning", "wide")
    if rank == 1:
        while not (work / "there").exists():
            time.sleep(0.05)
        raise RuntimeError("planted")
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    working()

os._exit(live(rank, work, body))
"""


def test_a_stack_begins_with_the_thread_that_works(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITH_THREADS, str(tmp_path)]
    commands = [(words, {**environment(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    with pytest.raises(RankBroken, match="rank 1 failed at: .*planted") as caught:
        supervise(Crew(2, 30.0, tmp_path, launched=False), commands)
    stack = caught.value.states[0].lines()[1:]
    assert "in working" in stack[1], stack
