"""What every rank's process does before anything else, and how it ends when something goes wrong.

A rank that fails writes down why and then stands still for a moment: the supervisor sees the file, asks every other
rank for its stack while it still is where it was, and ends them all. Standard library only, so that even an import
that hangs is seen.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import PipelineError
from pipeline.contract.exits import Exit
from pipeline.contract.files import write_json
from pipeline.contract.places import CACHE_FILE, ENV_WORKSPACE

from .steps import Steps, step_path
from .tied import tie

_FAREWELL_SECONDS = 30.0  # how long a failed rank waits to be ended by its supervisor
_RESERVE = 16 << 10  # bytes kept for a rank's failure, which is to be told on a full disk too
_NO_MEMORY = ("MemoryError", "OutOfMemoryError")  # the second is torch's, which is not imported here
_NO_MEMORY_SAID = ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation overflowed")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # what a full disk answers


class CollectiveFailed(BaseException):
    """A collective timed out or lost a rank; nothing more can be agreed on.

    No `Exception`: FlashInfer takes any exception inside a measurement for a bad tactic and would go on alone.
    """


class DeviceLost(BaseException):
    """A tactic destroyed this process's CUDA context: nothing more can run here. No `Exception`, as above."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed.

    `kind` is `refused` for an expected error of ours, `collective` where another rank did not come, `device` where a
    tactic destroyed the CUDA context, `bug` for anything else. The details of a bug are its traceback.
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


def stack_path(work: Path, rank: int) -> Path:
    """Where a rank writes its stack when it receives SIGUSR1."""
    return work / f"rank-{rank}.stack.txt"


def result_path(work: Path, rank: int) -> Path:
    """Where a rank writes what it found."""
    return work / f"rank-{rank}.result.json"


def saved_path(work: Path) -> Path:
    """Where rank 0 saves the cache, and its manifest beside it."""
    return work / "saved" / CACHE_FILE


def terms_path(work: Path) -> Path:
    """Where rank 0 writes which files of an interrupted run are of no use any more."""
    return work / "terms.json"


def read_failure(work: Path, rank: int) -> RankFailure | None:
    """A rank's failure, if it wrote one."""
    try:
        value: dict[str, Any] = json.loads(failure_path(work, rank).read_bytes())
    except (OSError, ValueError):
        return None
    return RankFailure(**{**value, "details": tuple(value["details"])})


def live(rank: int, work: Path, body: Callable[[Steps], None]) -> int:
    """Run a rank's work and return its exit code. Dies with its parent; tells its stack on SIGUSR1.

    The caller ends the process with `os._exit`: torch's and gloo's own shutdown can wait for a rank that is gone.
    """
    tie()
    reserve = work / f"rank-{rank}.reserve"
    with stack_path(work, rank).open("w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        steps = Steps(step_path(work, rank), rank)
        try:
            reserve.write_bytes(b" " * _RESERVE)
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


def environment() -> tuple[int, int]:
    """Rank and world size as the launcher set them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
