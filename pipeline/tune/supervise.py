"""Starting the ranks, watching them from outside, and ending all of them when one fails or stands still.

    supervisor ── torchrun ── rank 0 … rank N-1      each rank writes its step, its failure, its stack into the
         └───────── reads ───────────┘               supervisor's own temporary directory

The watchdog lies outside torchrun: it acts when a rank that is not waiting has said nothing for the group's timeout
and a margin, so it also sees what a collective's own timeout cannot (a rank that loops, a launcher that hangs).
Starting has a bound of its own, since nothing is said while libraries are imported; but a rank that the kernel holds
stopped imports nothing, and has the same bound there as later, as has a launcher that is held before all have started.
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipeline import log, run
from pipeline.contract.errors import UsageError
from pipeline.contract.places import ENV_WORKSPACE

from .diagnose import diagnose
from .looking import Stops, end, end_silent, look, silent
from .ports import free_port
from .processes import process_state, stopped
from .rank import read_failure
from .steps import RankStep, read_step, state_of
from .tied import starter
from .troubles import Situation

MARGIN = 10.0  # seconds that the watchdog grants beyond the group's timeout, so that the group speaks first
START_SECONDS = 240.0  # bound for all ranks to have started, imports and all
_POLL = 0.1
_LAUNCHER = -1  # in the place of a rank's number
_TAIL = 20


class NoTemporary(UsageError):
    """There is no directory to write to."""


class Process(Protocol):
    """What `pipeline.run.spawn` yields, as far as it is looked at here."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""


@dataclass(frozen=True)
class Nodes:
    """How many nodes tune together, which of them this is, and where they meet (`host:port` of node 0)."""

    count: int = 1
    rank: int = 0
    endpoint: str = ""

    def words(self) -> list[str]:
        """torchrun's words: one node asks no name server, several meet where they were told to."""
        if self.count == 1:
            return ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--local-addr=127.0.0.1"]
        host, _, port = self.endpoint.rpartition(":")
        return [
            f"--nnodes={self.count}", f"--node-rank={self.rank}", "--rdzv-backend=static",
            f"--rdzv-endpoint={self.endpoint}", f"--master-addr={host.strip('[]')}", f"--master-port={port}",
        ]  # fmt: skip


@dataclass(frozen=True)
class Crew:
    """How many ranks run, what bounds them (seconds), where they write, and what to tell about their progress."""

    nproc: int
    timeout: float
    work: Path
    on_step: Callable[[RankStep], None] | None = None
    ops: Sequence[str] = ()  # names of the plan's ops
    nodes: Nodes = Nodes()
    launched: bool = True  # by torchrun, which tells how ranks ended; else each rank is a process of ours

    @property
    def limit(self) -> float:
        """Seconds that a rank which waits for nobody may say nothing, or be stopped."""
        return self.timeout + MARGIN

    @property
    def patience(self) -> float:
        """Seconds after which a tactic is taken not to return, once the ranks that wait for it have given up: nearly
        as long as they waited, since ranks do not begin at the same moment.
        """
        return max(self.timeout - MARGIN, self.timeout / 2)

    @property
    def ranks(self) -> range:
        """The global numbers of this node's ranks."""
        first = self.nodes.rank * self.nproc
        return range(first, first + self.nproc)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A directory of our own, removed at the end: below FlashInfer's workspace where one is set, which must be
    writable anyway, else in the system's temporary directory. Raises `NoTemporary`.

    What a process that is on its way out still writes there may stay, and hides nothing of what is told.
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
    return {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "HOME": os.environ.get("HOME") or str(work),  # FlashInfer asks for a home even where it will not use it
        "TMPDIR": str(work),  # torchrun makes its own files there; nothing else may be writable
        ENV_WORKSPACE: os.environ.get(ENV_WORKSPACE) or _home() or str(work / "workspace"),
        # One node: the loopback device always exists, the host's name may be known to nobody.
        **({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")} if alone else {}),
        # The compiler is part of how FlashInfer builds its modules: another one in a server would build them again.
        **{name: os.environ[name] for name in ("CC", "CXX", "MAX_JOBS") if name in os.environ},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TQDM_DISABLE": "1",
        **starter(),
        "FLASHINFER_LOGGING_LEVEL": os.environ.get("FLASHINFER_LOGGING_LEVEL", "warning"),
    }


def _home() -> str:
    """The home directory when FlashInfer could write there, else nothing."""
    home = os.environ.get("HOME", "")
    return home if home and os.access(home, os.W_OK) else ""


def torchrun(crew: Crew, module: str, words: Sequence[str]) -> list[str]:
    """The command that runs `module` on every rank of this node."""
    return [
        sys.executable, "-m", "pipeline.tune.launch", str(crew.work / "launcher.json"),
        *crew.nodes.words(), f"--nproc-per-node={crew.nproc}", "--max-restarts=0", "--monitor-interval=0.1",
        "-m", module, *words,
    ]  # fmt: skip


def supervise(crew: Crew, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Start the commands and return when all end with 0; else end all ranks and raise what `diagnose` says."""
    said = crew.work / "ranks.log"
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(said.open("w", encoding="utf-8"))
        stack.callback(end, crew.work, crew.ranks)  # last out: whatever the launcher left
        processes = [
            stack.enter_context(run.spawn(command, env=env, stdout=sink, stderr=sink)) for command, env in commands
        ]
        # Before the launcher ends: they may not have tied themselves to it.
        stack.callback(lambda: end_silent(crew.work, crew.ranks, _started(processes), crew.launched))
        bound = _watch(crew, processes)
        if bound is None and all(process.returncode == 0 for process in processes):
            return
        if bound and _all_done(crew):
            log.warn(f"all ranks are done; what started them did not end within {bound:.0f} s, and is ended")
            return
        ended = next((p.returncode for p in processes if p.returncode), None) if crew.launched else None
        held = crew.launched and stopped(process_state(processes[0].pid))
        tells = crew.launched and not held and (ended is None or ended > 0)
        unheard = silent(crew.work, crew.ranks, _started(processes), crew.launched)
        states = look(crew.work, crew.ranks, launcher=tells, unheard=unheard)
        if not crew.launched:  # the ranks are our own processes: nobody else has to tell how one ended
            states = [replace(state, status=p.poll()) for state, p in zip(states, processes, strict=True)]
        tail = (*_tail(said), *_no_room(crew.work))
        situation = Situation(states, bound or None, ended, tail, crew.ops, crew.patience, held)
        end(crew.work, crew.ranks)
        raise diagnose(situation)


def _watch(crew: Crew, processes: Sequence[Process]) -> float | None:
    """Wait. None: all processes ended, or one ended badly. 0: a rank wrote a failure. Else: the bound that passed."""
    began = time.monotonic()
    told: tuple[str, int] | None = None
    stops = Stops()
    while True:
        states = [process.poll() for process in processes]
        if all(state == 0 for state in states) or any(state for state in states):
            return None
        if any(read_failure(crew.work, rank) for rank in crew.ranks):
            time.sleep(5 * _POLL)  # others may fail for the same reason: let them say so
            return 0.0
        steps = [read_step(crew.work, rank) for rank in crew.ranks]
        now = time.monotonic()
        stops.see(_letters(crew, processes, steps), now)
        # A rank that was stopped for a while and goes on must not lack that time when all have to have started.
        bound = crew.limit if stops.longest > crew.limit else _overdue(crew, steps, now - began - stops.all_told)
        if bound is not None:
            return bound
        leader = steps[0]
        if leader is not None and crew.on_step and (leader.step, leader.op) != told:
            told = (leader.step, leader.op)
            crew.on_step(leader)
        time.sleep(_POLL)


def _started(processes: Sequence[Process]) -> list[int]:
    """Those of our processes that still run."""
    return [process.pid for process in processes if process.poll() is None]


def _letters(crew: Crew, processes: Sequence[Process], steps: Sequence[RankStep | None]) -> dict[int, str]:
    """The kernel's letter for each rank, and for the launcher as long as it has ranks to start."""
    letters = {step.rank: state_of(step) for step in steps if step is not None}
    if None in steps:
        letters |= {one.rank: one.letter for one in silent(crew.work, crew.ranks, _started(processes), crew.launched)}
        letters |= {_LAUNCHER: process_state(processes[0].pid)} if crew.launched else {}
    return letters


def _overdue(crew: Crew, steps: Sequence[RankStep | None], elapsed: float) -> float | None:
    """The bound that has passed, if one has."""
    # Imports and meeting take long on a busy machine. What comes then may take hours (compiling), but says so.
    if any(step is None or not (step.begun or step.op) for step in steps):
        limit = max(START_SECONDS, crew.limit)
        return limit if elapsed > limit else None
    running = [step for step in steps if step is not None and step.state == "running"]
    active = [step for step in running if not step.waiting]
    # Those that are done have their process still to be ended, by a launcher that may be stopped itself.
    quiet = [time.monotonic() - step.changed for step in active or running or steps if step is not None]
    # Ranks that wait are bounded by those they wait for; when all wait, by themselves.
    late = max(quiet, default=0.0) if active else min(quiet, default=0.0)
    return crew.limit if late > crew.limit else None


def _all_done(crew: Crew) -> bool:
    """Whether every rank of this node has said that it is done."""
    return all((step := read_step(crew.work, rank)) is not None and step.state == "done" for rank in crew.ranks)


def _no_room(work: Path) -> tuple[str, ...]:
    """The line that a rank could not write: where it tells how it ends, there is no room for a page."""
    room = shutil.disk_usage(work)
    return (f"{os.strerror(errno.ENOSPC)}: {work}",) if room.total and room.free < mmap.PAGESIZE else ()


def _tail(said: Path) -> tuple[str, ...]:
    text = said.read_text(encoding="utf-8", errors="replace")
    return tuple(text.splitlines()[-_TAIL:])
