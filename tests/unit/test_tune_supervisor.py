"""Ranks as real processes: which ends, stops or hangs is found in time, and what the supervisor does then."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.errors import PipelineError
from pipeline.contract.places import ENV_WORKSPACE
from pipeline.tune import supervisor
from pipeline.tune.failures import RanksFailed, RankTrouble, Stall
from pipeline.tune.steps import ENV_STARTER, Attempt, Crash, RankStep, Steps, process_state, read_step, step_path
from pipeline.tune.supervisor import RESTARTS, START_SECONDS, WATCHDOG_MARGIN, Launch, Nodes, environment, overdue

ONE, OTHER = (Attempt("bf16_gemm", "Runner", [number], [[16, 8]], 16) for number in (1, 2))

RANK = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from pipeline.contract import files
from pipeline.tune.worker import live
rank, work = int(os.environ["RANK"]), Path(sys.argv[1])

def body(steps):
    steps.say("working")
    {body}

os._exit(live(rank, work, body))
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
STOP_TWICE = """
    for _ in range(2 if rank == 1 else 0):
        with subprocess.Popen(["sh", "-c", "sleep 1.6; kill -CONT $PPID"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.5)  # long enough to be seen at work
"""
# From here on nothing can be written but into the room that what is there already has.
FULL_DISK = """
    sync = os.fsync
    def full(handle):
        if any(path.stat().st_size for path in work.glob("*.reserve")):
            raise OSError(28, os.strerror(28))
        sync(handle)
    os.fsync = full
    files.write_json(work / "manifest.json", {})
"""
WITH_THREADS = """
    def working():
        (work / "there").touch()
        time.sleep(600)
    if rank == 1:
        while not (work / "there").exists():
            time.sleep(0.05)
        raise RuntimeError("planted")
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    working()
"""


def supervise(work: Path, code: str, timeout: float = 2.0, nproc: int = 2) -> None:
    supervisor.supervise(Launch(nproc, timeout, work), [sys.executable, "-c", code, str(work)], environment(work))


def failed(work: Path, code: str, timeout: float = 2.0, nproc: int = 2) -> RankTrouble:
    with pytest.raises(PipelineError) as caught:
        supervise(work, code, timeout, nproc)
    assert isinstance(caught.value, RankTrouble)
    return caught.value


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCHDOG_MARGIN", 1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_that_ended_a_rank_is_named(tmp_path: Path, number: signal.Signals) -> None:
    body = f"time.sleep(1); os.kill(os.getpid(), {int(number)}) if rank == 1 else time.sleep(600)"
    assert (
        failed(tmp_path, RANK.replace("{body}", body), 30.0).message == f"rank 1 was ended by {number.name} at: working"
    )


def test_a_python_that_does_not_start_is_said_with_what_it_printed(tmp_path: Path) -> None:
    error = failed(tmp_path, "import nothing_of_that_name")
    assert error.message == "no rank started"
    assert any("nothing_of_that_name" in line for line in error.details)


def test_a_stack_begins_with_the_thread_that_works(tmp_path: Path) -> None:
    error = failed(tmp_path, RANK.replace("{body}", WITH_THREADS), 30.0)
    assert error.message == "rank 1 failed at: working: RuntimeError: planted"
    stack = error.states[0].lines()[1:]
    assert "in working" in stack[1], stack


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_is_stopped_is_found_after_the_timeout_of_those_that_work(tmp_path: Path, silent: bool) -> None:
    """Although all of starting may take 240 s."""
    only = f"import os, signal\nif os.environ['RANK'] == '1': {STOP}\n"
    code = only + RANK.replace("{body}", "pass") if silent else RANK.replace("{body}", f"rank == 1 and {STOP}")
    began = time.monotonic()
    error = failed(tmp_path, code)
    assert 3.0 < time.monotonic() - began < 120.0
    place = "its start, before it said anything" if silent else "working"
    assert error.message == f"rank 1 is stopped at: {place}"
    assert [state.process for state in error.states] == ["", "T"]
    assert silent or "in body" in error.states[1].stack
    assert not error.crashes


def test_short_stops_end_nothing(tmp_path: Path) -> None:
    """Together they last longer than the timeout."""
    supervise(tmp_path, RANK.replace("{body}", STOP_TWICE))


def test_a_rank_on_a_full_disk_says_so(tmp_path: Path) -> None:
    error = failed(tmp_path, RANK.replace("{body}", FULL_DISK), 30.0, nproc=1)
    assert error.message.startswith("No space left on device (")
    assert error.message.endswith("manifest.json) at: working")
    assert int(error.exit_code) == 2
    assert "free room" in error.hint


def test_nothing_that_a_rank_started_is_left(tmp_path: Path) -> None:
    body = f"subprocess.Popen(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 600']); time.sleep(1); 1 / 0"
    failed(tmp_path, RANK.replace("{body}", body), 30.0, nproc=1)
    assert process_state(int((tmp_path / "pid").read_text())) in ("", "Z")


@pytest.mark.parametrize("starter", ["this process", "", "nonsense", "1"])
def test_a_process_whose_starter_has_ended_does_not_begin(starter: str) -> None:
    """One whose starter ends later is shown in tests/tune, with real ranks."""
    starter = str(os.getpid()) if starter == "this process" else starter
    code = "from pipeline.tune.steps import die_with_parent; die_with_parent(); print('began')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, ENV_STARTER: starter},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == ((-signal.SIGKILL, "") if starter == "1" else (0, "began\n"))


def step(rank: int, **changes: Any) -> RankStep:
    return RankStep(**{"rank": rank, "pid": 1, "step": "tuning x", "op": 1, **changes})


def test_the_watchdog_minds_the_rank_that_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCHDOG_MARGIN", WATCHDOG_MARGIN)
    launch, now = Launch(2, 5.0, tmp_path), time.monotonic()
    limit, old = 5.0 + WATCHDOG_MARGIN, now - 5.0 - WATCHDOG_MARGIN - 1
    for first, second, waited in [
        (step(0, changed=now), step(1, changed=now), None),
        # Rank 1 still works while rank 0 has waited for long: no hang
        (step(0, changed=old, waiting=True), step(1, changed=now), None),
        (step(0, changed=old, waiting=True), step(1, changed=old), limit),
        (step(0, changed=old, waiting=True), step(1, changed=now, waiting=True), None),
        (step(0, changed=old, state="done"), step(1, changed=now), None),
        # Compiling takes hours before the first op, and says so; a rank may have none of the ops
        (step(0, op=0, begun=True, changed=now), step(1, op=0, begun=True, changed=old, waiting=True), None),
        (step(0, op=0, begun=True, changed=old), step(1, op=0, begun=True, changed=old, waiting=True), limit),
    ]:
        assert overdue(launch, [first, second], 5400.0) == waited
    for elapsed, waited in ((START_SECONDS - 1, None), (START_SECONDS + 1, START_SECONDS)):
        assert overdue(launch, [None, step(1, op=0, changed=0.0)], elapsed) == waited


def test_a_step_survives_in_its_file(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 3), 3)
    steps.say("tuning x", "tactic 1", op=2)
    with pytest.raises(RuntimeError), steps.waiting():
        raise RuntimeError
    found = read_step(tmp_path, 3)
    assert found is not None
    assert (found.rank, found.pid, found.waiting, found.collective, found.op) == (3, os.getpid(), True, 1, 2)
    assert found.told() == "tuning x, tactic 1 (waiting for the other ranks)"
    steps.say("ä" * 5000, "\n" * 5000)
    assert read_step(tmp_path, 3) is not None
    for text in ("", "{", "[]", '{"rank": 1}', "\0" * 100):
        step_path(tmp_path, 0).write_text(text)
        assert read_step(tmp_path, 0) is None


def test_the_tactic_that_runs_is_in_the_step_file_until_something_else_is_said(tmp_path: Path) -> None:
    steps = Steps(step_path(tmp_path, 0), 0)

    def trying() -> Attempt | None:
        found = read_step(tmp_path, 0)
        assert found is not None
        return found.attempt

    steps.attempt(ONE, "words")
    assert trying() == ONE
    steps.say("something else")
    assert trying() is None
    steps.attempt(Attempt("op", "Runner", "x" * 5000, [], 1))  # has no room: then no tactic can be named
    assert trying() is None
    for one in (ONE, replace(ONE, tactic=-1), replace(ONE, entry="key"), ONE, None, None):
        steps.attempt(one)
    assert steps.now.returned == 2, "tactics that came back, defaults and what a cache answered apart"


@pytest.mark.parametrize("timeout", [300.0, 4.0])
def test_nothing_is_taken_not_to_return_before_the_others_would_give_up(timeout: float, tmp_path: Path) -> None:
    stuck_after = Launch(2, timeout, tmp_path).stuck_after
    assert max(timeout - WATCHDOG_MARGIN, timeout / 2) <= stuck_after <= timeout


def hung(attempt: Attempt, *ranks: int, doubtful: bool) -> RanksFailed:
    crash = Crash("qkv", attempt, "did not return within 300 s on rank 1")
    error = RanksFailed("rank 1 made no progress", details=["its stack"])
    error.crashes, error.stalls = (crash,), tuple(Stall(rank, crash, doubtful) for rank in ranks)
    return error


def restarted(
    monkeypatch: pytest.MonkeyPatch, work: Path, errors: list[RanksFailed], nodes: Nodes | None = None
) -> list[list[Any]]:
    """Which tactics each run was to leave out, when the first runs end with `errors`, and the next one well."""
    told: list[list[Any]] = []

    def one_run(launch: Launch, command: Sequence[str], env: Mapping[str, str]) -> None:
        options = json.loads((Path(command[-1]) / "options.json").read_text())
        assert (options["plan"], options["state"]) == ("p", str(work / "state") if launch.nodes.count == 1 else None)
        told.append([one["attempt"]["tactic"] for one in options["crashes"]])
        if len(told) <= len(errors):
            raise errors[len(told) - 1]

    monkeypatch.setattr(supervisor, "supervise", one_run)
    launch = Launch(2, 300.0, work, nodes=nodes or Nodes())
    supervisor.run_with_restarts(launch, {"plan": "p"}, None)
    return told


def test_tactics_that_hang_are_left_out_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the second run the rank came back from others before it met the next: the tactics are to blame."""
    errors = [hung(ONE, 0, 1, doubtful=True), hung(OTHER, 0, 1, doubtful=False)]
    assert restarted(monkeypatch, tmp_path, errors) == [[], [[1]], [[1], [2]]]


def test_on_another_rank_the_next_tactic_is_to_blame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = [hung(ONE, 0, doubtful=True), hung(OTHER, 1, doubtful=True)]
    assert len(restarted(monkeypatch, tmp_path, errors)) == 3


def test_a_rank_that_comes_back_from_nothing_is_to_blame_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as caught:
        restarted(monkeypatch, tmp_path, [hung(ONE, 1, doubtful=True), hung(OTHER, 0, 1, doubtful=True)])
    assert caught.value.message == (
        "rank 1 made no progress in a second tactic, so the rank is to blame: Runner tactic [2] of bf16_gemm at 16 "
        "tokens (qkv); before in Runner tactic [1] of bf16_gemm at 16 tokens (qkv)"
    )
    assert caught.value.details == ("its stack",)


@pytest.mark.parametrize(
    ("attempts", "nodes"),
    [
        ([replace(ONE, tactic=-1)], Nodes()),
        ([ONE, ONE], Nodes()),
        ([ONE], Nodes(2, 0, "h:1")),
        ([replace(ONE, tactic=[n]) for n in range(RESTARTS + 1)], Nodes()),
    ],
    ids=["the default", "left out already", "several nodes", "too many"],
)
def test_the_ranks_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: Sequence[Attempt], nodes: Nodes
) -> None:
    with pytest.raises(RanksFailed, match=r"^rank 1 made no progress$"):
        restarted(monkeypatch, tmp_path, [hung(one, 1, doubtful=False) for one in attempts], nodes)


def test_a_folder_that_somebody_still_writes_to_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written_to(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setenv(ENV_WORKSPACE, str(tmp_path))
    with pytest.raises(ZeroDivisionError), supervisor.temporary() as work:
        (work / "run-0").mkdir()
        monkeypatch.setattr(os, "rmdir", written_to)
        raise ZeroDivisionError
