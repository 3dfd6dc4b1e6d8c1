"""The only module that starts programs.

The environment of a child is built from an allow-list, its stdin is closed unless given, it leads a process group so
that all of it can be ended, and its output goes to the caller, to a log file, or to stderr; never to stdout, which is
data. Standard library only, because the image contains it too.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import log as talk
from .contract.errors import PipelineError, UsageError

# What a child may see: the search path, locale and home; the settings of pip, apt, TLS, proxies, Docker, SSH; what
# ranks read. Everything else, tokens above all, is left out.
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
_SECRETS = {"DOCKER_AUTH_CONFIG"}  # although its prefix is kept: who needs it passes it on
_PROXIES = {"http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy"}
_TAIL = 20
_LINGER = 5.0  # s; a process that outlives the one that was started, outside its group, may keep its pipe open for ever
PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT  # for `spawn`, where the caller talks with the process
Process = subprocess.Popen[str]  # what `spawn` yields


class ProgramMissing(UsageError):
    """A program that is needed is not on PATH."""


class ProcessFailed(PipelineError):
    """A process ended with an unexpected status; `details` holds its last lines."""

    def __init__(self, command: Sequence[str], status: int, tail: Sequence[str], log: str = "") -> None:
        super().__init__(f"{_name(command)} {describe(status)}", details=tail, log=log)
        self.command = tuple(command)
        self.status = status


class ProcessTimedOut(ProcessFailed):
    """A process was ended because its time was over."""

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
    """An exit status in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    return f"ended with exit code {status}"


def spelled(command: Sequence[str]) -> str:
    """The command as one could type it."""
    return shlex.join(command)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allow-listed part of this process's environment, with `extra` on top."""
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
        raise ProgramMissing(f"{name} was not found on PATH", hint=hint or f"install {name}, or add its folder to PATH")
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


def process_of_functions(set_up: Callable[..., None], *words: object) -> ProcessPoolExecutor:
    """A process of this Python, started afresh, that runs functions; `set_up` runs in it before the first."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_up, words)


class _Reader:
    """Takes in what a process prints: to the log, to stderr, to a listener, and its last lines."""

    def __init__(self, sink: IO[str] | None, echo: bool, on_line: Callable[[str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.failure: Exception | None = None  # the first that `on_line` raised
        self._sink, self._echo, self._on_line = sink, echo, on_line
        self._rest = b""

    def read(self, process: subprocess.Popen[str], pipe: IO[str], deadline: float) -> bool:
        """Read until the pipe ends, or `_LINGER` seconds after the process did; return False at the deadline."""
        ended = None
        while True:
            readable, _, _ = select.select(
                [pipe], [], [], 0.1 if ended else min(0.5, max(0.0, deadline - time.monotonic()))
            )
            if readable:
                block = os.read(pipe.fileno(), 1 << 16)
                if not block:
                    break
                self._take(block)
            elif process.poll() is not None:
                ended = ended or time.monotonic()
            if ended and time.monotonic() - ended > _LINGER:
                break
            if not ended and time.monotonic() >= deadline:
                return False
        self._take(b"\n" if self._rest else b"")
        return True

    def _take(self, block: bytes) -> None:
        *lines, self._rest = (self._rest + block).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, text: str) -> None:
        self.tail.append(text)
        if self._sink is not None:
            try:
                self._sink.write(text + "\n")
                self._sink.flush()
            except OSError as error:  # what the process does is worth more than what it prints
                talk.warn(f"{self._sink.name} cannot be written to: {error.strerror}")
                close(self._sink)
                self._sink = None
        if self._echo:
            talk.line(text)
        if self._on_line is not None and self.failure is None:
            try:
                self._on_line(text)
            except Exception as failure:  # noqa: BLE001 - raised at the end; until then everything is read
                self.failure = failure


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
    with contextlib.ExitStack() as stack:
        sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("a", encoding="utf-8", errors="replace")
            stack.callback(close, sink)
            sink.write(f"+ {spelled(command)}\n")
        # A file, so that there is one pipe to read.
        data = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) if capture else None
        )
        source = stack.enter_context(stdin.open("rb")) if stdin is not None else None
        out, err = (data, PIPE) if data is not None else (PIPE, subprocess.STDOUT)
        process = stack.enter_context(spawn(command, env=env, cwd=cwd, stdin=source, stdout=out, stderr=err))
        pipe = process.stderr if data is not None else process.stdout
        assert pipe is not None
        stack.callback(close, pipe)
        reader = _Reader(sink, echo, on_line)
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        status: int | None = None
        try:
            if reader.read(process, pipe, deadline):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(None if timeout is None else max(0.1, deadline - time.monotonic()))
        finally:
            if process.poll() is None:  # what it prints while it is ended is still read
                end_group(process)
                reader.read(process, pipe, math.inf)
        stdout = ""
        if data is not None:
            data.seek(0)
            stdout = data.read()
    if reader.failure is not None:
        raise reader.failure
    lines = tuple(reader.tail)
    if status is None:
        raise ProcessTimedOut(command, timeout or 0.0, lines, str(log or ""))
    if status not in accept:
        raise ProcessFailed(command, status, lines, str(log or ""))
    return Finished(status, stdout, lines)
