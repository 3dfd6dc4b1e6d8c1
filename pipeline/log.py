"""What a user sees: steps with times, notes and warnings, all on stderr. stdout is data and belongs to commands.

Standard library only, so that the image carries it too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from .contract.errors import PipelineError
from .contract.text import shown

QUIET, NORMAL, VERBOSE = -1, 0, 1
_COLOURS = {"dim": "2", "red": "31", "green": "32", "yellow": "33", "bold": "1"}
_level = NORMAL


class Display(Protocol):
    """Shows running steps; `pipeline.terminal` has two, and without one steps are plain lines."""

    def step(self, title: str) -> AbstractContextManager[None]:
        """Show a step for as long as it runs."""

    def progress(self, text: str, done: int | None, of: int) -> None:
        """Say what the innermost step is at."""


_display: Display | None = None


def set_display(display: Display | None) -> None:
    """Choose how steps are shown."""
    global _display  # noqa: PLW0603 - one process has one stderr
    _display = display


def set_level(level: int) -> None:
    """Choose what is shown: `QUIET` only warnings and errors, `VERBOSE` also details."""
    global _level  # noqa: PLW0603 - one process has one stderr
    _level = level


def is_verbose() -> bool:
    """Whether details are shown."""
    return _level >= VERBOSE


def _paint(text: str, colour: str) -> str:
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def line(text: str) -> None:
    """Write a line as it is.

    A stderr that takes nothing more (its reader has left, a disk is full) must not end work that took hours.
    """
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the process's whole life


def _safe(text: str) -> str:
    """A text, which may quote what somebody typed or wrote, on one line and without what a terminal would obey."""
    return shown(text.expandtabs(), 8 * len(text))


def _say(text: str) -> None:
    if _level > QUIET:
        line(text)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, and on leaving it say how long it took or that it failed."""
    title = _safe(title)
    began = time.monotonic()
    try:
        if _display is None or _level <= QUIET:
            _say(f"{_paint('→', 'bold')} {title}")
            yield
        else:
            with _display.step(title):
                yield
    except BaseException:
        line(f"{_paint('✗', 'red')} {title} {_paint(f'{time.monotonic() - began:.1f}s', 'dim')}")
        raise
    _say(f"{_paint('✓', 'green')} {title} {_paint(f'{time.monotonic() - began:.1f}s', 'dim')}")


def progress(text: str, done: int | None = None, of: int = 0) -> None:
    """Say what the running step is at, where it is shown live: `done` of `of` parts, or as many as said before."""
    if _display is not None:
        _display.progress(_safe(text), done, of)


def note(text: str) -> None:
    """Say something worth knowing."""
    _say(f"  {_safe(text)}")


def detail(text: str) -> None:
    """Say something that only `--verbose` shows."""
    if is_verbose():
        line(f"  {_paint(_safe(text), 'dim')}")


def warn(text: str) -> None:
    """Say something that may be wrong; in GitHub Actions also as an annotation."""
    text = _safe(text)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line(f"::warning::{text}")
    line(f"{_paint('warning:', 'yellow')} {text}")


def stop(message: str, hint: str = "") -> None:
    """Say why a command ends as it does, and what to type, where stdout has the particulars already."""
    line(f"{_paint('error:', 'red')} {_safe(message)}")
    if hint:
        line(f"hint: {_safe(hint)}")


def fail(error: PipelineError) -> None:
    """Show an expected failure: details, one clear line, a hint, the log's path."""
    for detail_line in error.details:
        line(f"    {_safe(detail_line)}")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line(f"::error::{_safe(error.message)}")
    stop(error.message, error.hint)
    if error.log:
        line(f"log: {_safe(error.log)}")
