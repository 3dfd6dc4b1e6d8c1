"""How steps are shown where somebody watches: a live line for each on a terminal, a fold group in GitHub Actions.

Elsewhere `pipeline.log` writes a plain line when a step begins and another when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import log

if TYPE_CHECKING:
    from rich.progress import Progress, Task


def display() -> log.Display | None:
    """What suits this process's stderr; None for plain lines."""
    if sys.stderr.isatty():
        return None if os.environ.get("TERM", "dumb") == "dumb" else Live()
    return Groups() if os.environ.get("GITHUB_ACTIONS") == "true" else None


class Groups:
    """GitHub folds what stands between two commands; groups do not nest, so only the outermost step is one."""

    def __init__(self) -> None:
        self._depth = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Open a group, and close it before the line that says how the step ended."""
        self._depth += 1
        log.line(f"::group::{title}" if self._depth == 1 else f"→ {title}")
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                log.line("::endgroup::")

    def progress(self, text: str, done: int | None, of: int) -> None:
        """Nothing: the notes say it."""


class Live:
    """A line for each running step: its title, what it is at, how much of it is done, seconds, and seconds left.

    rich keeps these lines below everything else that is written to stderr, and has no colours where NO_COLOR is set.
    """

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._tasks: list[Any] = []

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step while it runs; its line vanishes at its end."""
        shown = self._shown or self._begin()
        task = shown.add_task(title, total=None, said="", ends=None)
        self._tasks.append(task)
        try:
            yield
        finally:
            self._tasks.remove(task)
            shown.remove_task(task)
            if not self._tasks:
                shown.stop()
                self._shown = None

    def progress(self, text: str, done: int | None, of: int) -> None:
        """Say of the innermost step what it is at; from the second of `of` on also when it may end."""
        if self._shown is None or not self._tasks:
            return
        changes: dict[str, Any] = {"said": text}
        if done is not None:
            changes |= {"completed": done, "total": of}
            past = self._shown.tasks[-1].elapsed
            if done and past is not None:
                changes["ends"] = time.monotonic() + past * (of - done) / done
        self._shown.update(self._tasks[-1], **changes)

    def _begin(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
        from rich.text import Text

        class At(ProgressColumn):
            def render(self, task: Task) -> Text:
                said = told(task.description, task.completed, task.total, task.fields)
                return Text(said, no_wrap=True, overflow="ellipsis")

        console = Console(stderr=True, highlight=False)
        self._shown = Progress(
            SpinnerColumn("line"), TimeElapsedColumn(), At(), console=console, transient=True, redirect_stdout=False
        )
        self._shown.start()
        return self._shown


def told(title: str, done: float, of: float | None, fields: dict[str, Any]) -> str:
    """A step in one line."""
    parts = [title]
    if of and of > 1:
        parts.append(f"{int(done)} of {int(of)} done")
    if fields["ends"] is not None:
        left = max(0.0, fields["ends"] - time.monotonic())
        parts.append(f"about {f'{left / 60:.0f} min' if left > 90 else f'{left:.0f} s'} left")
    return " · ".join([*parts, *([fields["said"]] if fields["said"] else [])])
