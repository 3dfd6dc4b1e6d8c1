"""What an interrupted tuning had finished, kept for the next one of the same inputs.

    <cache home>/unfinished/<inputs digest>/        one file for each finished op, as `pipeline.tune --state` writes it

A container's state is copied out while it runs, op by op, so that whatever ends it or us leaves the finished ops here.
A RUN step of BuildKit keeps its state in a cache mount with the same digest in its name, which never leaves the engine.
The files hold a digest of all that decided them and one of themselves: the ranks judge them, not the host.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.errors import PipelineError
from pipeline.contract.places import STATE_ROOT

if TYPE_CHECKING:
    from docker.models.containers import Container

_EVERY = 2.0  # seconds between two copies at least


@dataclass(frozen=True)
class Unfinished:
    """The folder of one inputs digest, and whether to start anew."""

    place: Path
    anew: bool = False

    @property
    def name(self) -> str:
        """What a cache mount is named after."""
        return self.place.name[:32]

    def options(self) -> tuple[str, ...]:
        """For `python -m pipeline.tune`, beside `--state`, which every way of running it has."""
        return ("--no-resume",) if self.anew else ()

    def folder(self) -> Path:
        """The folder, there and with nothing in it where nothing is to be taken up."""
        if self.anew:
            shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True, exist_ok=True)
        return self.place

    def drop(self) -> None:
        """Forget it: the tuning ended well."""
        shutil.rmtree(self.place, ignore_errors=True)

    def take(self, container: Container) -> None:
        """Copy what a container holds, running or ended, in place of what is here; what cannot be had is left."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        with contextlib.suppress(DockerException, RequestException, PipelineError, OSError):
            chunks, _ = container.get_archive(STATE_ROOT)
            with tempfile.TemporaryDirectory(dir=self.place.parent, prefix=".copying-") as scratch:
                safe_extract(chunks, Path(scratch) / "state", strip=1)
                (Path(scratch) / "state").mkdir(exist_ok=True)
                if self.place.exists():
                    self.place.rename(Path(scratch) / "old")
                (Path(scratch) / "state").rename(self.place)


@dataclass
class Copier:
    """Copies a container's state when its ranks say something: an op is finished before the next one is told."""

    unfinished: Unfinished
    container: Container
    on_line: Callable[[str], None]
    _last: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, line: str) -> None:
        """Hand a line on, and copy."""
        self.on_line(line)
        if time.monotonic() - self._last >= _EVERY and self._lock.acquire(blocking=False):
            try:
                self.unfinished.take(self.container)
                self._last = time.monotonic()
            finally:
                self._lock.release()

    def last(self) -> None:
        """Copy once more, at the end, and say what there is."""
        with self._lock:
            self.unfinished.take(self.container)
        kept = len(list(self.unfinished.place.glob("*.json")))
        if kept:
            log.note(f"{kept} finished pieces of the tuning are kept: the same command takes them up")
