"""One piece of work in a copy of this process, beside what the process itself does, and within bounds.

It is for work that is pure and may be without end because people wrote it (templates). `run` starts programs; this
starts none. Where no copy can be made (no `fork`, or threads that a copy would not have), the work is done here.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Tell = Callable[[str], None]

SECONDS = 5  # of a processor
MEMORY = 1 << 30  # bytes beyond what this process has


class OutOfBounds(Exception):
    """The work took more than it may: `what` of it, and `at` which part of it, as it told last."""

    def __init__(self, what: str, at: str) -> None:
        super().__init__(f"{at}: {what}")
        self.what = what
        self.at = at


@contextmanager
def beside(work: Callable[[Tell], T], *, seconds: int = SECONDS, memory: int = MEMORY) -> Iterator[Callable[[], T]]:
    """Begin `work` and give a function that waits for what it returns; leaving the context ends it.

    The work is handed a function to say which part it is at. It returns plain values (`marshal` knows which). What it
    raises is raised by doing it again here, so that nothing is lost of it. That function raises `OutOfBounds`.
    """
    if not hasattr(os, "fork") or _threads():
        yield lambda: work(lambda _: None)
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _do(work, writing, seconds, memory)
    os.close(writing)
    ended = False

    def answer() -> T:
        nonlocal ended
        with open(reading, "rb", closefd=False) as stream:
            said = stream.read()
        _, status = os.waitpid(child, 0)
        ended = True
        at, results = _understood(said)
        if results:
            return results[0]  # type: ignore[return-value]
        code = os.waitstatus_to_exitcode(status)
        if code == _NO_MEMORY:
            raise OutOfBounds(f"takes more than {memory >> 20} MiB", at)
        if code == -signal.SIGXCPU:
            raise OutOfBounds(f"takes more than {seconds} s", at)
        if code < 0:
            raise OutOfBounds(f"was ended by {signal.Signals(-code).name}", at)
        return work(lambda _: None)

    try:
        yield answer
    finally:
        os.close(reading)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


_FAILED, _NO_MEMORY = 1, 2


def _threads() -> bool:
    """Whether this process has threads: only the one that forks lives on in a copy."""
    threading = sys.modules.get("threading")
    return threading is not None and threading.active_count() > 1


def _do(work: Callable[[Tell], Any], writing: int, seconds: int, memory: int) -> None:
    """The copy's whole life; it never returns."""
    status = _FAILED
    try:
        _bound(seconds, memory)
        with open(writing, "wb", buffering=0) as stream:

            def tell(at: str) -> None:
                stream.write(marshal.dumps((at, ())))

            result = work(tell)
            stream.write(marshal.dumps(("", (result,))))
        status = 0
    except MemoryError:
        status = _NO_MEMORY
    except BaseException:  # noqa: BLE001, S110 -- told by the status; whoever waits does it again and sees what it is
        pass
    finally:
        os._exit(status)


def _bound(seconds: int, memory: int) -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):  # a lower bound of the system's stays
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        has = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _understood(said: bytes) -> tuple[str, tuple[object, ...]]:
    """What the copy told last, and its result in a tuple; empty where it did not come to its end."""
    at: str = ""
    results: tuple[object, ...] = ()
    stream = io.BytesIO(said)
    with contextlib.suppress(EOFError, ValueError, TypeError):
        while stream.tell() < len(said):
            at, results = marshal.load(stream)  # noqa: S302 -- from a copy of ourselves
    return at, results
