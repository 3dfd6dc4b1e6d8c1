"""Ranks that are processes of the supervisor's own, as in a replay: how one ended is known without a launcher."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pipeline.contract.places import ENV_WORKSPACE
from pipeline.tune import supervise as supervising
from pipeline.tune.processes import process_state
from pipeline.tune.supervise import Crew, environment, supervise, temporary
from pipeline.tune.troubles import RankBroken, RankLost, RankStopped

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
    time.sleep(600)

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
    time.sleep(600)

def body(steps):
    steps.say("tuning", "wide")
    if rank == 1:
        while not (work / "there").exists():
            time.sleep(0.05)
        raise RuntimeError("planted")
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    working()

os._exit(live(rank, work, body))
"""


def test_a_stack_begins_with_the_thread_that_works(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITH_THREADS, str(tmp_path)]
    commands = [(words, {**environment(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    with pytest.raises(RankBroken, match=r"rank 1 failed at: .*planted") as caught:
        supervise(Crew(2, 30.0, tmp_path, launched=False), commands)
    stack = caught.value.states[0].lines()[1:]
    assert "in working" in stack[1], stack


STOPPING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from pipeline.tune.rank import live
rank, waking, times = int(os.environ["RANK"]), sys.argv[2], int(sys.argv[3])

def body(steps):
    steps.say("importing torch and FlashInfer")
    for _ in range(times if rank == 1 else 0):
        with subprocess.Popen(["sh", "-c", waking]):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.5)  # long enough to be seen at work

os._exit(live(rank, Path(sys.argv[1]), body))
"""


def stopping(work: Path, waking: str, times: int) -> None:
    """Supervise two ranks of which one is stopped while it starts, and woken by a command; the bound is 3 s."""
    words = [sys.executable, "-c", STOPPING, str(work), waking, str(times)]
    commands = [(words, {**environment(work), "RANK": str(rank)}) for rank in range(2)]
    supervise(Crew(2, 2.0, work, launched=False), commands)


def test_a_rank_that_is_stopped_while_it_starts_is_found_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "MARGIN", 1.0)
    began = time.monotonic()
    with pytest.raises(RankStopped, match="rank 1 is stopped at: importing torch and FlashInfer") as caught:
        stopping(tmp_path, "true", 1)
    assert 3.0 < time.monotonic() - began < 120.0  # all of starting may take 240 s
    assert [state.process for state in caught.value.states] == ["", "T"]
    assert "in body" in caught.value.states[1].stack
    assert not caught.value.crashes


SILENT = (
    """
import os, signal, sys
if os.environ["RANK"] == "1":
    open(sys.argv[2], "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    + STOPPING
)

LAUNCHER = """
import os, signal, subprocess, sys
ranks = []
for rank in range(2):
    if sys.argv[1] == f"stops before {rank}":
        os.kill(os.getpid(), signal.SIGSTOP)
    environment = {**os.environ, "RANK": str(rank)}
    ranks.append(subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], env=environment, start_new_session=True))
for rank in ranks:
    rank.wait()
"""


def found_stopped(crew: Crew, commands: list[tuple[list[str], dict[str, str]]]) -> RankStopped:
    """What a rank or launcher that is stopped at once is told as; all of starting may take 240 s."""
    began = time.monotonic()
    with pytest.raises(RankStopped) as caught:
        supervise(crew, commands)
    assert 3.0 < time.monotonic() - began < 120.0
    return caught.value


@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_that_is_stopped_before_it_says_anything_is_found_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    monkeypatch.setattr(supervising, "MARGIN", 1.0)
    pid = tmp_path / "pid"
    words = [SILENT, str(tmp_path), str(pid), "0"]
    if launched:
        commands = [([sys.executable, "-c", LAUNCHER, "runs", *words], dict(environment(tmp_path)))]
    else:
        commands = [([sys.executable, "-c", *words], {**environment(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    error = found_stopped(Crew(2, 2.0, tmp_path, launched=launched), commands)
    assert error.message == "rank 1 is stopped at: its start, before it said anything"
    assert error.states[1].process == "T"
    assert process_state(int(pid.read_text())) in ("", "Z"), (
        "it could not tie itself to anyone, and is ended all the same"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_is_stopped_before_all_ranks_have_started_is_found_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(supervising, "MARGIN", 1.0)
    words = [sys.executable, "-c", LAUNCHER, f"stops before {rank}", STOPPING, str(tmp_path), "true", "0"]
    error = found_stopped(Crew(2, 2.0, tmp_path), [(words, dict(environment(tmp_path)))])
    assert error.message == "the launcher of the ranks is stopped"
    assert [state.step.state for state in error.states if state.step] == ["done"] * rank


def test_short_stops_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they last longer than the bound."""
    monkeypatch.setattr(supervising, "MARGIN", 1.0)
    stopping(tmp_path, "sleep 1.6; kill -CONT $PPID", 2)


LINGERING = """
import os, sys, time
from pathlib import Path
from pipeline.tune.rank import live

assert live(int(os.environ["RANK"]), Path(sys.argv[1]), lambda steps: steps.begin()) == 0
time.sleep(600)
"""


def test_done_ranks_whose_launcher_does_not_end_are_waited_for_no_longer_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that was stopped keeps nobody from what the ranks have finished."""
    monkeypatch.setattr(supervising, "MARGIN", 1.0)
    words = [sys.executable, "-c", LINGERING, str(tmp_path)]
    commands = [(words, {**environment(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    began = time.monotonic()
    supervise(Crew(2, 2.0, tmp_path, launched=False), commands)
    assert 3.0 < time.monotonic() - began < 120.0
    assert "all ranks are done" in capsys.readouterr().err


def test_a_folder_that_somebody_still_writes_to_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written_to(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setenv(ENV_WORKSPACE, str(tmp_path))
    with pytest.raises(ZeroDivisionError), temporary() as work:
        (work / "run-0").mkdir()
        monkeypatch.setattr(os, "rmdir", written_to)
        raise ZeroDivisionError
