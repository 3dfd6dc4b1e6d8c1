"""The only module that starts programs (`beside` copies this process, for work of our own).

The environment of a child is built from an allow-list, its stdin is closed unless given, it leads a process group
of its own so that all of it can be ended, and its output goes to the caller, to a log file, or to stderr; never
to our stdout, which is data. Standard library only, so that the image carries it too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import IO

from . import log as talk
from .contract.errors import PipelineError, UsageError

# What a child may see: the search path, locale and home; the settings of pip, apt, TLS, proxies, Docker, SSH;
# what the tuned stage and its ranks read. Everything else (tokens above all) stays here.
_KEPT = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TERM", "TMPDIR", "TZ", "CI", "NO_COLOR",
    "SSH_AUTH_SOCK", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE",
    "SOURCE_DATE_EPOCH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYENV_VERSION",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
}  # fmt: skip
_KEPT_PREFIXES = (
    "PIP_", "SSL_CERT_", "DOCKER_", "BUILDX_", "BUILDKIT_", "APT_", "DEB", "FLASHINFER_", "PIPELINE_",
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH",
)  # fmt: skip
_SECRETS = {"DOCKER_AUTH_CONFIG"}  # although their prefix is kept: whoever needs one is handed it
_PROXIES = {"http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy"}
_TAIL = 20
_HELD = 5.0  # seconds: a process that outlives the one we started, outside its group, may hold its pipe open for ever
PIPE = subprocess.PIPE  # for `spawn`, where the caller talks with the process


class ProgramMissing(UsageError):
    """A program that is needed is not on PATH."""


class ProcessFailed(PipelineError):
    """A process ended with an unexpected status; `details` holds its last lines."""

    def __init__(self, command: Sequence[str], status: int, tail: Sequence[str], log: str = "") -> None:
        super().__init__(f"{_name(command)} {describe(status)}", details=tail, log=log)
        self.command = tuple(command)
        self.status = status


class ProcessTimedOut(ProcessFailed):
    """A process was ended because it outlived its bound."""

    def __init__(self, command: Sequence[str], seconds: float, tail: Sequence[str], log: str = "") -> None:
        super().__init__(command, -signal.SIGKILL, tail, log)
        self.message = f"{_name(command)} was ended after {seconds:.0f} s without finishing"
        self.args = (self.message,)


@dataclass(frozen=True)
class Finished:
    """Exit status (negative: the signal), captured stdout, and the last lines of everything that was printed."""

    status: int
    stdout: str
    tail: tuple[str, ...]


def _name(command: Sequence[str]) -> str:
    words = [Path(command[0]).name, *command[1:3]]
    return " ".join(w for w in words if not w.startswith("-") and len(w) < 40)


def describe(status: int) -> str:
    """Say an exit status in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    return f"ended with exit code {status}"


def spelled(command: Sequence[str]) -> str:
    """The command as one could type it."""
    return shlex.join(command)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed part of our own environment, with `extra` on top."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _SECRETS and (name in _KEPT or name.startswith(_KEPT_PREFIXES) or name.lower() in _PROXIES)
    }
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("LANG", "C.UTF-8")
    return {**kept, **(extra or {})}


def find_program(name: str, *, hint: str = "") -> str:
    """The path of a program; raise `ProgramMissing` with a hint when there is none."""
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(
            f"{name} was not found on PATH", hint=hint or f"install {name}, or name its folder in PATH"
        )
    return found


def end_group(process: subprocess.Popen[str], *, grace: float = 5.0) -> None:
    """End a child and everything in its process group: SIGTERM, a grace, SIGKILL."""
    for sign, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            if sign == signal.SIGKILL:
                return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
    stdin: int | IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own group and end the whole group on the way out, whatever happened.

    Whoever asks for a pipe closes it: closing one here would wait for a thread that reads it.
    """
    find_program(command[0])
    process = subprocess.Popen(
        list(command),
        env=clean_environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=sys.stderr.fileno() if stdout is None else stdout,
        stderr=sys.stderr.fileno() if stderr is None else stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_group(process)


def close(stream: IO[str]) -> None:
    """Close a log or a pipe that may take no more: on a full disk, or with its reader gone, the rest would be tried."""
    with contextlib.suppress(OSError):
        stream.close()


class _Readers:
    """The threads that read what a process says, each until its pipe ends; who is still reading at `end` is left."""

    def __init__(self, sink: IO[str] | None, echo: bool, on_line: Callable[[str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.captured: list[str] = []
        self._sink, self._echo, self._on_line = sink, echo, on_line
        self._taking = Lock()  # held while a line is taken in: none comes once the log is closed
        self._over = False
        self.failure: Exception | None = None  # the first that `on_line` raised
        self._threads: list[Thread] = []

    def start(self, process: subprocess.Popen[str]) -> None:
        """Read stdout as data and stderr as lines, or stdout as lines where both are one."""
        both = [(process.stdout, self._collect), (process.stderr, self._follow)]
        for stream, way in both if process.stderr is not None else [(process.stdout, self._follow)]:
            self._threads.append(Thread(target=way, args=(stream,), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """Wait until all is read, for a while; take in nothing after that."""
        deadline = time.monotonic() + _HELD
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._taking:
            self._over = True

    def _follow(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._taking:
                    if not self._over and self.failure is None:
                        try:
                            self._take(line.rstrip("\n"))
                        except Exception as failure:  # noqa: BLE001 - raised at the end; until then all is read
                            self.failure = failure

    def _take(self, text: str) -> None:
        self.tail.append(text)
        if self._sink is not None:
            try:
                self._sink.write(text + "\n")
                self._sink.flush()
            except OSError as error:  # what the process does is worth more than what it says
                talk.warn(f"{self._sink.name} takes nothing more: {error.strerror}")
                close(self._sink)
                self._sink = None
        if self._echo:
            talk.line(text)
        if self._on_line is not None:
            self._on_line(text)

    def _collect(self, stream: IO[str]) -> None:
        with stream:
            self.captured.extend(stream)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    capture: bool = False,
    log: Path | None = None,
    echo: bool = False,
    on_line: Callable[[str], None] | None = None,
    timeout: float | None = None,
    accept: Sequence[int] = (0,),
    stdin: Path | None = None,
) -> Finished:
    """Run a process to its end.

    `capture` returns stdout (stderr then goes to the log, the echo and the tail); otherwise both are merged.
    `log` receives every line; `echo` repeats each line on our stderr; `on_line` sees each line, and what it raises is
    raised at the end. A status outside `accept` raises `ProcessFailed` with the last 20 lines; `timeout` (seconds)
    raises `ProcessTimedOut`.
    """
    expired = False
    with contextlib.ExitStack() as stack:
        sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("a", encoding="utf-8", errors="replace")
            stack.callback(close, sink)
            sink.write(f"+ {spelled(command)}\n")
        source = stack.enter_context(stdin.open("rb")) if stdin is not None else None
        process = stack.enter_context(
            spawn(
                command,
                env=env,
                cwd=cwd,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if capture else subprocess.STDOUT,
            )
        )
        readers = _Readers(sink, echo, on_line)

        def expire() -> None:
            nonlocal expired
            expired = True
            end_group(process)

        timer = Timer(timeout, expire) if timeout is not None else None
        try:
            readers.start(process)
            if timer is not None:
                timer.daemon = True
                timer.start()
            status = process.wait()
        finally:
            if timer is not None:
                timer.cancel()
            if process.poll() is None:  # interrupted: what it says while it is ended is still read
                end_group(process)
            readers.end()
    if readers.failure is not None:
        raise readers.failure
    lines = tuple(readers.tail)
    if expired:
        raise ProcessTimedOut(command, timeout or 0.0, lines, str(log or ""))
    if status not in accept:
        raise ProcessFailed(command, status, lines, str(log or ""))
    return Finished(status, "".join(readers.captured), lines)
