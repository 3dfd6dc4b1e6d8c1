"""From what each rank last said to one sentence that names the right rank. No processes, no clock, no torch.

A rank describes its own failure (`describe`). The supervisor collects what it knows of all ranks (`Situation`), and
`diagnose` makes the error of it: which rank, which tactic, which remedy. What is no failure but looks wrong, a choice
among one or a measurement of nothing, becomes a note (`doubt`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import CacheRefused, Exit, PipelineError, UsageError, WarmUpError
from pipeline.contract.manifest import Covered
from pipeline.contract.places import ENV_WORKSPACE
from pipeline.contract.plan import OpPlan

from .steps import Crash, RankStep, stopped
from .strategies import weights

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # what a full disk answers
_NO_MEMORY = ("MemoryError", "OutOfMemoryError")  # the second is torch's, which is not imported here
_NO_MEMORY_SAID = ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation overflowed")
_STACK_LINES = 14
ONE_CANDIDATE = "one candidate: nothing to choose from"
MEASURED_NOTHING = "profiling measured nothing"
_FLOPS = 2e16  # per second: more than any single device does in any format

# NCCL (src/misc/shmutils.cc) and torch's loaders name /dev/shm or a shared memory segment; CUDA's and torch's own
# words are those of cudaGetErrorString.
_REMEDIES = (
    (
        re.compile(r"(?i)(/dev/shm|shared memory)[^\n]*(no space|error|fail|insufficient|bus error)|"
                   r"(no space left|bus error|error while creating|failed to (extend|open|create))[^\n]*"
                   r"(/dev/shm|shared memory)"),
        "shared memory is too small for NCCL: a container needs --shm-size=1g or more, or --ipc=host",
    ),
    (
        re.compile(r"(?i)no space left on device|disk quota exceeded"),
        f"free room on that disk; {ENV_WORKSPACE} moves what ranks write, and what they compile",
    ),
    (
        re.compile(r"(?i)out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        "out of GPU memory: end what else uses the GPU (REQUIRE_IDLE=1 refuses a busy one), or plan with a smaller "
        "--max-tokens; a server takes a smaller share of memory by its own option",
    ),
    (
        re.compile(r"(?i)driver version is insufficient|provided PTX was compiled with an unsupported toolchain"),
        "the driver is older than the image's CUDA: update it, or choose a base made for an older CUDA",
    ),
)  # fmt: skip


class CollectiveFailed(BaseException):
    """A collective timed out or lost a rank; nothing more can be agreed on.

    No `Exception`: FlashInfer takes any exception inside a measurement for a bad tactic and would go on alone.
    """


class DeviceLost(BaseException):
    """A tactic destroyed this process's CUDA context: nothing more can run here. No `Exception`, as above."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed, in its own words.

    `kind` is `refused` for an expected error, `collective` where another rank did not come, `device` where a tactic
    destroyed the CUDA context, `bug` for anything else. The details of a bug are its traceback.
    """

    rank: int
    kind: str
    exit_code: int
    message: str
    hint: str = ""
    details: tuple[str, ...] = ()


def failure_path(work: Path, rank: int) -> Path:
    """Where a rank writes its failure."""
    return work / f"rank-{rank}.failure.json"


def read_failure(work: Path, rank: int) -> RankFailure | None:
    """A rank's failure, if it wrote one."""
    try:
        value: dict[str, Any] = json.loads(failure_path(work, rank).read_bytes())
    except (OSError, ValueError):
        return None
    return RankFailure(**{**value, "details": tuple(value["details"])})


def describe(rank: int, error: BaseException, place: str) -> RankFailure:
    """The failure of a rank that `error` ended at `place`: no traceback where the error says enough."""
    if isinstance(error, PipelineError):
        return RankFailure(rank, "refused", int(error.exit_code), error.message, error.hint, error.details)
    if isinstance(error, CollectiveFailed):
        return RankFailure(rank, "collective", int(Exit.WARM_UP), str(error))
    if isinstance(error, DeviceLost):
        return RankFailure(rank, "device", int(Exit.WARM_UP), str(error))
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f" ({error.filename})" if error.filename else ""
        hint = f"nothing was saved; free room on that disk, or set {ENV_WORKSPACE} to a folder of another"
        return RankFailure(rank, "refused", int(Exit.USAGE), f"{os.strerror(error.errno)}{where} at: {place}", hint)
    if type(error).__name__ in _NO_MEMORY or any(words in str(error) for words in _NO_MEMORY_SAID):
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        hint = "nothing was saved; free memory, plan with a smaller --max-tokens, or leave the op out (--skip-ops)"
        return RankFailure(rank, "refused", int(Exit.WARM_UP), f"out of memory at: {place}", hint, tuple(said))
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return RankFailure(rank, "bug", int(Exit.INTERNAL), f"{type(error).__name__}: {error}", details=tuple(lines))


@dataclass(frozen=True)
class RankState:
    """All that is known about one rank at the moment of the diagnosis.

    `process` is the kernel's letter for the process, empty where it has ended; `status` what it ended with (negative:
    the signal), None while it runs; `silent` seconds since the last step changed.
    """

    rank: int
    step: RankStep | None
    process: str = ""
    silent: float = 0.0
    failure: RankFailure | None = None
    status: int | None = None
    stack: str = ""

    @property
    def place(self) -> str:
        """The last step in words."""
        return "its start, before it said anything" if self.step is None else self.step.told()

    @property
    def trace(self) -> str:
        """Where the rank was. One that failed by itself has left that place: only its own words say it."""
        return "" if self.failure else self.stack

    def lines(self) -> list[str]:
        """The last step and the end of the stack, for people."""
        state = {"T": ", stopped", "t": ", stopped by a debugger", "Z": ", ended", "": ", ended"}.get(self.process, "")
        said = f"rank {self.rank}: {self.place}, {self.silent:.1f} s ago{state}"
        return [said, *(f"    {line}" for line in self.trace.splitlines()[:_STACK_LINES])]

    def to_json(self) -> dict[str, Any]:
        """What failure.json says of this rank."""
        return {"rank": self.rank, "step": self.place, "stack": self.trace, "status": self.status}


@dataclass(frozen=True)
class Situation:
    """Every rank, the seconds that the watchdog waited where it is what ended them, the last lines that were printed,
    and the names of the plan's ops. What a rank has run for `stuck_after` seconds when the others give up on it does
    not return.
    """

    ranks: Sequence[RankState]
    waited: float | None = None
    tail: Sequence[str] = ()
    ops: Sequence[str] = ()
    stuck_after: float = math.inf

    @property
    def silent(self) -> str:
        """For how long the watchdog waited, in words."""
        return "" if self.waited is None else f" for {self.waited:.0f} s"

    def crash(self, state: RankState, how: str) -> Crash:
        """The tactic that a rank is inside of, and what came of it."""
        step = state.step
        assert step is not None
        assert step.attempt is not None
        return Crash(self.ops[step.op - 1] if 0 < step.op <= len(self.ops) else "", step.attempt, how)


@dataclass(frozen=True)
class Stall:
    """A rank that did not come back from a tactic.

    `doubtful` says that the rank itself may be to blame: the others came back and waited for it, or it has come back
    from no tactic at all since it started and the others are not in the same one.
    """

    rank: int
    crash: Crash
    doubtful: bool


class RankTrouble(PipelineError):
    """Something happened to the ranks.

    `states` is what was known of each when it was found; `crashes` the tactics that did it, which can be left out;
    `stalls` the ranks that did not come back from theirs.
    """

    states: Sequence[RankState] = ()
    crashes: Sequence[Crash] = ()
    stalls: Sequence[Stall] = ()


class RanksFailed(RankTrouble, WarmUpError):
    """A rank ended, hung, or refused to go on."""


class RankUsageRefused(RankTrouble, UsageError):
    """A rank refused to go on, and the plan or an option is to blame."""


class RankCacheRefused(RankTrouble, CacheRefused):
    """The same, where a cache is to blame."""


def remedy(said: Iterable[str], otherwise: str) -> str:
    """The remedy for the first known cause in these lines; `otherwise` where there is none."""
    text = "\n".join(said)
    return next((hint for pattern, hint in _REMEDIES if pattern.search(text)), otherwise)


def diagnose(now: Situation) -> RankTrouble:
    """The error to raise for a failed run, with every rank's state.

    The rank to name is found in this order: an expected error of a rank; a tactic that ended one; a rank that has
    ended or is stopped, which outranks the timeouts that it causes elsewhere; an unexpected exception; ranks that are
    waited for.
    """
    details = [line for state in now.ranks for line in state.lines()]
    error = (
        _refused(now) or _crashed(now, details) or _lost(now, details) or _stopped(now, details)
        or _broken(now, details) or _waiting(now, details)
    )  # fmt: skip
    error.states = tuple(now.ranks)
    return error


def _refused(now: Situation) -> RankTrouble | None:
    refused = [state.failure for state in now.ranks if state.failure and state.failure.kind == "refused"]
    if not refused:
        return None
    first = refused[0]
    kinds: dict[int, type[RankTrouble]] = {Exit.USAGE: RankUsageRefused, Exit.CACHE: RankCacheRefused}
    everywhere = len(refused) == len(now.ranks) and len({one.message for one in refused}) == 1
    about = "" if everywhere or f"rank {first.rank} " in first.message else f"rank {first.rank}: "
    return kinds.get(first.exit_code, RanksFailed)(about + first.message, details=first.details, hint=first.hint)


def _crashed(now: Situation, details: Sequence[str]) -> RankTrouble | None:
    """Ranks that ended by themselves, or lost their GPU, while they ran a tactic."""
    crashes: dict[bytes, Crash] = {}
    for state in now.ranks:
        if state.step is None or state.step.attempt is None:
            continue
        if state.failure is not None:
            if state.failure.kind != "device":
                continue
            how = f"the GPU of rank {state.rank} takes no more work: {state.failure.message}"
        elif state.status in (None, 0, -signal.SIGKILL, -signal.SIGTERM):  # whoever sends these ends any process
            continue
        else:
            how = f"rank {state.rank} {_ended(state.status)}"
        one = now.crash(state, how)
        for suspect in one.attempt.suspects:
            crashes.setdefault(suspect.identity, Crash(one.op, suspect, how))
    if not crashes:
        return None
    error = RanksFailed(
        f"a tactic ended its rank: {next(iter(crashes.values())).told()}",
        details=[*now.tail, *details],
        hint="nothing was saved; leave the op out with --skip-ops, and report the tactic to FlashInfer",
    )
    error.crashes = tuple(crashes.values())
    return error


def _ended(status: int | None) -> str:
    """How a process ended, in words."""
    if not status:
        return "ended without an error message"
    if status > 0:
        return f"ended with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _lost(now: Situation, details: Sequence[str]) -> RankTrouble | None:
    """Ranks that have ended and said nothing of it."""
    ended = [state for state in now.ranks if state.status is not None and state.failure is None]
    gone = [state for state in ended if state.status or state.step is None or state.step.state != "done"]
    if not gone:
        return None
    if not any(state.step for state in now.ranks):
        return RanksFailed("no rank started", details=[*now.tail, *details], hint="the details are their last lines")
    first = gone[0]
    # A page of /dev/shm that is full ends who touches it.
    bus = ["bus error: shared memory"] if first.status == -signal.SIGBUS else []
    return RanksFailed(
        f"rank {first.rank} {_ended(first.status)} at: {first.place}",
        details=[*now.tail, *details],
        hint=remedy([*bus, *now.tail], "nothing was saved; SIGKILL often means that the machine ran out of memory"),
    )


def _stopped(now: Situation, details: Sequence[str]) -> RankTrouble | None:
    held = next((state for state in now.ranks if stopped(state.process)), None)
    if held is None:
        return None
    return RanksFailed(
        f"rank {held.rank} is stopped at: {held.place}",
        details=details,
        hint="nothing was saved; it was stopped from outside (SIGSTOP, a debugger, a frozen container)",
    )


def _broken(now: Situation, details: Sequence[str]) -> RankTrouble | None:
    broken = next((state for state in now.ranks if state.failure and state.failure.kind == "bug"), None)
    if broken is None or broken.failure is None:
        return None
    said = [broken.failure.message, *broken.failure.details]
    return RanksFailed(
        f"rank {broken.rank} failed at: {broken.place}: {broken.failure.message}",
        details=[*broken.failure.details, *details],
        hint=remedy([*said, *now.tail], "nothing was saved; the details are its traceback"),
    )


def _waiting(now: Situation, details: Sequence[str]) -> RankTrouble:
    """Nobody failed by itself: the others wait for a rank, or all wait for each other."""
    missing = [state for state in now.ranks if state.step is None]
    active = [s for s in now.ranks if s.step is not None and not s.step.waiting and s.step.state == "running"]
    late = missing or sorted(active, key=lambda state: -state.silent)
    if late:
        return _late(late[0], now, () if missing else _stalls(now, active), details)
    steps = [(state.step.collective, state.rank, state) for state in now.ranks if state.step is not None]
    (first, _, behind), (last, _, ahead) = min(steps, key=lambda s: s[:2]), max(steps, key=lambda s: (s[0], -s[1]))
    if first != last:
        return RanksFailed(
            f"rank {behind.rank} waits in its collective {first} at: {behind.place}; "
            f"rank {ahead.rank} is at collective {last}",
            details=details,
            hint="nothing was saved; the ranks did not take the same steps",
        )
    said = next((state.failure.message for state in now.ranks if state.failure), "")
    return RanksFailed(
        f"the ranks wait for each other{now.silent} at: {behind.place}" + (f" ({said})" if said else ""),
        details=[*details, *now.tail],
        hint="nothing was saved; the ranks reached the same place and could not talk to each other",
    )


def _late(one: RankState, now: Situation, stalls: Sequence[Stall], details: Sequence[str]) -> RankTrouble:
    """The error for a rank that the others waited for, and the tactics that it and others are inside of."""
    where = next((f", in {stall.crash.named()}" for stall in stalls if stall.rank == one.rank), "")
    error = RanksFailed(
        f"rank {one.rank} made no progress{now.silent} at: {one.place}{where}; the other ranks waited for it",
        details=details,
        hint="nothing was saved; its stack is among the details; a longer --timeout helps only a slow rank",
    )
    error.stalls = tuple(stalls)
    error.crashes = tuple({stall.crash.attempt.identity: stall.crash for stall in reversed(stalls)}.values())
    return error


def _stalls(now: Situation, active: Sequence[RankState]) -> tuple[Stall, ...]:
    """The ranks that are inside a tactic which does not return; `active` are those that run and wait for nobody.

    None where no timeout has passed, or where one of the ranks that are late names no tactic: it is that rank which
    the others wait for.
    """
    given_up = any(state.failure is not None and state.failure.kind == "collective" for state in now.ranks)
    late = [(s, s.step.attempt) for s in active if s.step is not None and s.silent >= now.stuck_after]
    if not (given_up or now.waited is not None) or any(attempt is None for _, attempt in late):
        return ()
    same = {attempt.identity for _, attempt in late if attempt is not None}
    everywhere = len(late) == len(now.ranks) > 1 and len(same) == 1  # on one rank alone it may be the rank
    return tuple(
        Stall(
            state.rank,
            now.crash(state, f"did not return within {int(state.silent)} s on rank {state.rank}"),
            doubtful=given_up or (not everywhere and state.step is not None and state.step.returned == 0),
        )
        for state, _ in late
    )


def least_ms(op: OpPlan, bucket: int) -> float:
    """A time that no device can beat for an op's multiplications at a token count, in milliseconds."""
    return 2e3 * bucket * weights(op) / _FLOPS


def doubt(times_ms: Sequence[float], least: float) -> str:
    """What to note about a choice among these times (infinite: failed); empty where nothing is odd."""
    alive = [time for time in times_ms if math.isfinite(time)]
    if len(alive) == 1:
        return ONE_CANDIDATE
    if alive and (max(alive) == 0 or max(alive) < least):
        return f"{MEASURED_NOTHING}: no tactic took more than {max(alive):.3g} ms, the work needs {least:.3g} ms"
    return ""


def doubtful(rows: Sequence[Covered]) -> list[str]:
    """One line for each op whose choice is none, with the buckets it concerns."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for why in (ONE_CANDIDATE, MEASURED_NOTHING):
            if row.note.startswith(why):
                found.setdefault((row.op, why), []).append(row.bucket)
    return [f"{op} at {', '.join(map(str, buckets))} tokens: {why}" for (op, why), buckets in found.items()]
