"""Starting the ranks, watching them from outside, and ending all of them when one fails or hangs.

    supervisor ──┬── rank 0         each rank writes its step, its failure and its stack into the supervisor's
                 └── rank N-1       own temporary directory, and the supervisor reads them

The watchdog ends the run when a rank that waits for no other has written no step for the process group's timeout plus
`WATCHDOG_MARGIN`. So it also finds a rank that loops, which a collective's timeout does not. The start has a timeout of
its own (`START_SECONDS`), since a rank writes no step while it imports libraries. A rank that the kernel has stopped
imports nothing: the shorter timeout counts for it at the start too. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline import log, run
from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_json
from pipeline.contract.places import ENV_WORKSPACE

from . import hooks
from .failures import RanksFailed, RankState, RankTrouble, Situation, diagnose, read_failure
from .steps import Crash, RankStep, process_state, read_step, stack_path, starter, stopped

WATCHDOG_MARGIN = 10.0  # seconds that the watchdog waits beyond the group's timeout, so that the group speaks first
START_SECONDS = 240.0  # for all ranks to have started, imports and all
RESTARTS = 5  # of one tuning at most; each costs what starting the ranks costs, and the op that was being tuned
_POLL = 0.1
_STACKS = 10.0  # seconds to wait for stacks
_GONE = 10.0  # seconds to wait for ranks that were ended, whose devices take a while to give their memory back
_TAIL = 20


class NoTemporary(UsageError):
    """There is no directory to write to."""


@dataclass(frozen=True)
class Nodes:
    """How many nodes tune together, which of them this is, and where they meet (`host:port` of node 0)."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""


@dataclass(frozen=True)
class Launch:
    """How many ranks this node runs, their timeout (seconds), where they write, and whom to tell about their progress.

    `ops` are the names of the plan's ops.
    """

    nproc: int
    timeout: float
    work: Path
    on_step: Callable[[RankStep], None] | None = None
    ops: Sequence[str] = ()
    nodes: Nodes = Nodes()

    @property
    def limit(self) -> float:
        """Seconds that a rank which waits for no other may say nothing, or be stopped."""
        return self.timeout + WATCHDOG_MARGIN

    @property
    def stuck_after(self) -> float:
        """Seconds after which a tactic is taken not to return, once the ranks that wait for it have given up: nearly
        as long as they waited, since ranks do not begin at the same moment.
        """
        return max(self.timeout - WATCHDOG_MARGIN, self.timeout / 2)


@dataclass(frozen=True)
class _Rank:
    """A rank of this node, as the supervisor sees it."""

    number: int
    process: run.Process
    work: Path

    def step(self) -> RankStep | None:
        return read_step(self.work, self.number)

    def letter(self, step: RankStep | None) -> str:
        """The kernel's letter for its process, empty once that has ended."""
        return "" if self.process.poll() is not None else process_state(step.pid if step else self.process.pid)

    def stack(self) -> str:
        """What it wrote on SIGUSR1, the thread that works first: faulthandler begins with the newest."""
        try:
            text = stack_path(self.work, self.number).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n\n".join(reversed(text.strip().split("\n\n")))


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A directory of our own, removed at the end: below FlashInfer's workspace where one is set, which must be
    writable anyway, else in the system's temporary directory. Raises `NoTemporary`.

    What a process that is on its way out still writes there may stay; it must not hide an error.
    """
    workspace = os.environ.get(ENV_WORKSPACE)
    try:
        if workspace:
            Path(workspace).mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="tune-", dir=workspace or None, ignore_cleanup_errors=True)
    except OSError as error:
        raise NoTemporary(
            f"cannot write to {workspace or 'any temporary directory'}: {error.strerror}",
            hint=f"set {ENV_WORKSPACE} to a directory that this user may write",
        ) from error
    with made as name:
        yield Path(name)


def environment(work: Path, nodes: Nodes | None = None) -> dict[str, str]:
    """What every rank gets beyond the allow-list of `pipeline.run`."""
    alone = nodes is None or nodes.count == 1
    code = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (code, os.environ.get("PYTHONPATH", "")) if p)
    home = os.environ.get("HOME", "")
    writable = home if home and os.access(home, os.W_OK) else ""
    return {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HOME": home or str(work),  # FlashInfer asks for a home even where it will not use it
        "TMPDIR": str(work),  # nothing else may be writable
        ENV_WORKSPACE: os.environ.get(ENV_WORKSPACE) or writable or str(work / "workspace"),
        # One node: the loopback device always exists, the host's name may be known to nobody.
        **({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if alone else {}),
        # The compiler is part of how FlashInfer builds its modules: another one in a server would build them again.
        **{name: os.environ[name] for name in ("CC", "CXX", "MAX_JOBS") if name in os.environ},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TQDM_DISABLE": "1",
        **starter(),
        "FLASHINFER_LOGGING_LEVEL": os.environ.get("FLASHINFER_LOGGING_LEVEL", "warning"),
    }


def python(*words: str) -> list[str]:
    """The command that runs a module in this Python."""
    return [hooks.changed("python", sys.executable), "-m", *words]


def supervise(launch: Launch, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run `command` as each rank of this node; return when all end with 0, else end all and raise what `diagnose` says.

    A rank reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.
    """
    said, first = launch.work / "ranks.log", launch.nodes.rank * launch.nproc
    sizes = {"WORLD_SIZE": str(launch.nproc * launch.nodes.count), "LOCAL_WORLD_SIZE": str(launch.nproc)}
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(said.open("w", encoding="utf-8"))
        ranks: list[_Rank] = []
        for local in range(launch.nproc):
            own = {**env, **sizes, "RANK": str(first + local), "LOCAL_RANK": str(local)}
            process = stack.enter_context(run.spawn(command, env=own, stdout=sink, stderr=sink))
            ranks.append(_Rank(first + local, process, launch.work))
        stack.callback(_end, ranks)
        waited = _watch(launch, ranks)
        if waited is None and all(rank.process.returncode == 0 for rank in ranks):
            return
        states = _snapshot(ranks)
        tail = (*said.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:], *_no_room(launch.work))
        _end(ranks)
        raise diagnose(Situation(states, waited or None, tail, launch.ops, launch.stuck_after))


def _watch(launch: Launch, ranks: Sequence[_Rank]) -> float | None:
    """Wait. None: all ranks ended, or one ended badly. 0: a rank wrote a failure. Else: the seconds of a timeout."""
    began = time.monotonic()
    told: tuple[str, int] | None = None
    stopped_since: dict[int, float] = {}
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if any(codes) or all(code == 0 for code in codes):
            time.sleep(_POLL if any(codes) else 0.0)  # several may end for one reason
            return None
        if any(read_failure(launch.work, rank.number) for rank in ranks):
            time.sleep(5 * _POLL)  # others may fail for the same reason: let them say so
            return 0.0
        steps = [rank.step() for rank in ranks]
        now = time.monotonic()
        halted = [r.number for r, step in zip(ranks, steps, strict=True) if stopped(r.letter(step))]
        stopped_since = {number: stopped_since.get(number, now) for number in halted}
        if any(now - since > launch.limit for since in stopped_since.values()):
            return launch.limit
        if (waited := overdue(launch, steps, now - began)) is not None:
            return waited
        leader = steps[0]
        if leader is not None and launch.on_step and (leader.step, leader.op) != told:
            told = (leader.step, leader.op)
            launch.on_step(leader)
        time.sleep(_POLL)


def overdue(launch: Launch, steps: Sequence[RankStep | None], elapsed: float) -> float | None:
    """The timeout that has passed, if one has."""
    # Imports and meeting take long on a busy machine. What comes then may take hours (compiling), but says so.
    if any(step is None or not (step.begun or step.op) for step in steps):
        limit = max(START_SECONDS, launch.limit)
        return limit if elapsed > limit else None
    running = [step for step in steps if step is not None and step.state == "running"]
    active = [step for step in running if not step.waiting]
    quiet = [time.monotonic() - step.changed for step in active or running or steps if step is not None]
    # Ranks that wait are limited by those they wait for; when all wait, by themselves.
    late = max(quiet, default=0.0) if active else min(quiet, default=0.0)
    return launch.limit if late > launch.limit else None


def _snapshot(ranks: Sequence[_Rank]) -> list[RankState]:
    """Ask every living rank for its stack and collect what is known of each. A stopped rank is woken to answer."""
    steps = {rank.number: rank.step() for rank in ranks}
    now = time.monotonic()
    letters = {rank.number: rank.letter(steps[rank.number]) for rank in ranks}
    # What a stopped rank does once it is woken is a consequence, not a cause.
    said_before = {rank.number: read_failure(rank.work, rank.number) for rank in ranks if stopped(letters[rank.number])}
    asked: list[_Rank] = []
    for rank in ranks:
        step = steps[rank.number]
        if step is not None and letters[rank.number]:
            asked.append(rank)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(step.pid, signal.SIGUSR1)
                if stopped(letters[rank.number]):
                    os.kill(step.pid, signal.SIGCONT)
    # The thread that works is the last that is written: a stack is whole once that has begun and nothing is added.
    seen: list[str] = []
    while time.monotonic() - now < _STACKS:
        before, seen = seen, [rank.stack() for rank in asked if rank.process.poll() is None]
        if all("Current thread" in one for one in seen) and seen == before:
            break
        time.sleep(_POLL)
    return [
        RankState(
            rank=rank.number,
            step=step,
            process=letters[rank.number],
            silent=max(0.0, now - step.changed) if step else 0.0,
            failure=said_before[rank.number] if rank.number in said_before else read_failure(rank.work, rank.number),
            status=None if rank.number in said_before else rank.process.poll(),
            stack=rank.stack(),
        )
        for rank in ranks
        for step in (steps[rank.number],)
    ]


def _end(ranks: Sequence[_Rank]) -> None:
    """SIGKILL all ranks and what they started, and wait: a driver first takes their kernels off its device."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _no_room(work: Path) -> tuple[str, ...]:
    """The line that a rank could not write: where it tells how it ends, there is no room for a page."""
    room = shutil.disk_usage(work)
    return (f"{os.strerror(errno.ENOSPC)}: {work}",) if room.total and room.free < mmap.PAGESIZE else ()


def run_with_restarts(launch: Launch, options: Mapping[str, object], state: Path | None) -> Path:
    """Run `pipeline.tune.worker` on every rank until it ends well; return the working directory of that run.

    A kernel that destroys the CUDA context, ends its process or never ends cannot be tried and left behind: everything
    that the process has is gone with it. So all ranks are ended and started again, leave that tactic out at that
    bucket, and resume with the ops that were finished: from `state`, else from a directory of our own.

    Raises what `supervise` raises, where no tactic is to blame, the default itself is, or one that is left out already,
    and after RESTARTS; where it is a rank that does not come back, whatever it runs, an error that says so.
    """
    crashes: list[Crash] = []
    stalled: dict[int, Crash] = {}
    alone = launch.nodes.count == 1  # nodes that do not know of each other's crashes cannot start again together
    kept = state or (launch.work / "state" if alone else None)
    if kept is not None:
        kept.mkdir(exist_ok=True)
    for number in range(RESTARTS + 1):
        work = launch.work / f"run-{number}"
        work.mkdir()
        more = {"work": str(work), "state": kept and str(kept)}
        write_json(work / "options.json", {**options, **more, "crashes": [asdict(crash) for crash in crashes]})
        command = python("pipeline.tune.worker", str(work))
        try:
            supervise(replace(launch, work=work), command, environment(launch.work, launch.nodes))
        except RankTrouble as error:
            fresh = _to_leave_out(error, crashes)
            if not alone or number == RESTARTS or not fresh:
                raise
            _blame_rank(error, stalled)
            stalled |= {one.rank: one.crash for one in error.stalls}
            crashes += fresh
            for one in fresh:
                log.warn(f"left out from now on: {one.told()}")
            log.note(f"starting the ranks again ({number + 1} of {RESTARTS} times at most)")
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
    """Raise an error for a rank that hung before as well, with nothing to show that it is not to blame."""
    again = next((one for one in error.stalls if one.doubtful and one.rank in stalled), None)
    if again is None:
        return
    found = RanksFailed(
        f"rank {again.rank} made no progress in a second tactic, so the rank is to blame: "
        f"{again.crash.named()}; before in {stalled[again.rank].named()}",
        details=error.details,
        hint="nothing was saved; look at what that rank's device does; a longer --timeout helps only a slow rank",
    )
    found.states = error.states
    raise found from error
