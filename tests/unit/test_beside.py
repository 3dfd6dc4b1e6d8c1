"""Work in a copy of the process: its answer, its bounds, and that it ends with whoever asked for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from pipeline.beside import OutOfBounds, beside

Tell = Callable[[str], None]


def test_what_it_returns_comes_back_from_another_process() -> None:
    with beside(lambda _: (os.getpid(), {"a": b"\0\xff" * 100_000})) as answer:
        pid, files = answer()
    assert pid != os.getpid()
    assert files == {"a": b"\0\xff" * 100_000}


def test_what_it_raises_is_raised_here() -> None:
    def work(_: Tell) -> int:
        raise LookupError("no such thing")

    with beside(work) as answer, pytest.raises(LookupError, match="no such thing"):
        answer()


def test_a_loop_without_end_is_ended_and_says_where_it_was() -> None:
    def work(tell: Tell) -> int:
        tell("one")
        tell("two")
        while True:
            pass

    with beside(work, seconds=1) as answer, pytest.raises(OutOfBounds) as caught:
        answer()
    assert (caught.value.at, caught.value.what) == ("two", "takes more than 1 s")


def test_memory_has_a_bound() -> None:
    def work(tell: Tell) -> int:
        tell("large")
        return len(bytearray(1 << 30))

    with beside(work, memory=100 << 20) as answer, pytest.raises(OutOfBounds, match="large: takes more than 100 MiB"):
        answer()


def test_one_that_nobody_waits_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    fork = os.fork

    def noted() -> int:
        pid = fork()
        copies.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted)

    def work(_: Tell) -> int:
        time.sleep(3600)
        return 1

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), beside(work):
        raise ZeroDivisionError
    assert time.monotonic() - began < 60
    (copy,) = copies
    with pytest.raises(ChildProcessError):  # it was waited for: nothing of it is left
        os.waitpid(copy, os.WNOHANG)


def test_beside_threads_nothing_is_copied() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with beside(lambda _: os.getpid()) as answer:
            assert answer() == os.getpid()
    finally:
        done.set()
        thread.join()
