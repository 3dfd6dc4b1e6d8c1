"""Starts of a server, one after another, watched from inside its container: files, processes, log, requests.

    python3 -I <folder>/watch.py spec.json result.json      (or `watch` from within a process that is there already)

Runs on the image's own Python, standard library only. A start ends in one of `ready`, `died`, `timeout`, `refused`
(it was ready and refused a request); its result says which, with the last lines and what became of each rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from pipeline import log, run
from pipeline.servers import collect, kinds
from pipeline.servers.starts import PORT, Spec, Start

_POLL = 0.05  # seconds; a compiler of C++ or CUDA runs longer
_NOTE = 30.0
_STOP = 30.0
_COMPILERS = frozenset({"cc1plus", "cc1", "cicc", "ptxas", "ninja", "collect2", "clang", "lld"})
# What lies there is no part of an image, or changes by itself.
_SKIPPED = frozenset({"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/run"})  # noqa: S108
_ASKS = frozenset({b"--version", b"-dumpversion", b"-dumpmachine", b"-v", b"-V"})
_NAMED = ("VLLM", "sglang")  # how the servers name their ranks
_PR_SET_CHILD_SUBREAPER = 36

Files = dict[str, tuple[int, int]]  # path → size in bytes, time of last change in ns


class Process(Protocol):
    """What `run.spawn` yields, as far as it is needed here."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""


def watch(spec: Spec, folder: Path) -> tuple[list[Start], dict[str, Any]]:
    """Start until a start writes nothing new, at most `spec.most` times. `folder` is for the logs."""
    _adopt()
    starts: list[Start] = []
    before = files_of("/")
    for number in range(1, spec.most + 1):
        log.note(f"start {number}: {run.spelled(_hidden(spec))}")
        start = one_start(spec, folder / f"start-{number}.log")
        after = files_of("/")
        start.new = {path: size for path, (size, _) in after.items() if path not in before}
        start.changed = {p: v[0] for p, v in after.items() if p in before and before[p] != v}
        before = after
        starts.append(start)
        if start.outcome != "ready":
            break
        log.note(f"start {number}: ready after {start.ready:.1f} s, {sum(kinds.count(start.new).values())} new files")
        if number > 1 and not kinds.count(start.new, spec.root):
            break
    return starts, _facts(spec) if starts[-1].outcome == "ready" else {}


def _hidden(spec: Spec) -> list[str]:
    return [word if word != spec.token or not word else "***" for word in spec.command]


def one_start(spec: Spec, logfile: Path) -> Start:
    """Start the server, wait for its health, ask, stop it; whatever it left running is ended."""
    port = _free_port()
    words = [word.replace(PORT, str(port)) for word in spec.command]
    environment = {**os.environ, **spec.environment}
    with logfile.open("w", encoding="utf-8") as sink:
        began = time.monotonic()
        with (
            run.spawn(words, env=environment, stdout=sink, stderr=sink) as process,
            _Observer(logfile, began) as observer,
        ):
            start = observer.start
            try:
                _until_ready(process, spec, port, observer)
                if start.outcome == "ready":
                    _ask(spec, port, observer)
            finally:
                observer.rest()
                _stop(process)
        start.seconds = round(time.monotonic() - began, 2)
    return start


def _until_ready(process: Process, spec: Spec, port: int, observer: _Observer) -> None:
    start = observer.start
    noted = 0.0
    while True:
        past = observer.past()
        status = process.poll()
        if status is not None:
            observer.rest()
            start.outcome, start.message = "died", f"it {run.describe(status)} before it was ready" + _who(start)
            return
        if past > spec.ready:
            observer.rest()
            start.outcome = "timeout"
            start.message = f"it was not ready within {spec.ready:.0f} s" + _who(start)
            return
        if _get(port, spec.health, 2.0) == http.HTTPStatus.OK:
            start.outcome, start.ready = "ready", round(observer.past(), 2)
            return
        if past - noted > _NOTE:
            noted = past
            said = start.lines[-1][1][:120] if start.lines else ""
            log.note(f"starting for {past:.0f} s" + (f": {said}" if said else ""))
        time.sleep(_POLL)


def _ask(spec: Spec, port: int, observer: _Observer) -> None:
    for ways in spec.requests:
        sent = time.monotonic()
        said = ""
        for path, body in ways:
            status, said = _post(port, path, body, spec)
            if status == http.HTTPStatus.OK:
                break
        else:
            observer.rest()
            observer.start.outcome = "refused"
            observer.start.message = f"a request got no answer: {said}" + _who(observer.start)
            return
        observer.start.answers.append(round(time.monotonic() - sent, 3))


def _get(port: int, path: str, timeout: float) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", f"/{path}")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _post(port: int, path: str, body: Mapping[str, Any], spec: Spec) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=spec.answer)
    headers = {"Content-Type": "application/json"}
    if spec.token:
        headers["Authorization"] = f"Bearer {spec.token}"
    try:
        connection.request("POST", f"/{path}", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, f"{path}: {answer.status} {answer.read(2000).decode(errors='replace')[:300]}"
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{path}: {error!r}"
    finally:
        connection.close()


class _Observer:
    """A thread that notes what the server prints, with times, which compilers run, and how its named processes are."""

    def __init__(self, logfile: Path, began: float) -> None:
        self.start = Start()
        self._stream = logfile.open("rb")
        self._began, self._pending = began, b""
        self._seen: dict[int, str] = {}
        self._over = Event()
        self._thread = Thread(target=self._loop, daemon=True)

    def __enter__(self) -> _Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        self._read()  # what it printed while it was stopped
        self._stream.close()

    def past(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def rest(self) -> None:
        """Observe a last time and no more."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._read()
            self._look()

    def _loop(self) -> None:
        while not self._over.wait(_POLL):
            self._read()
            self._look()

    def _read(self) -> None:
        *lines, self._pending = (self._pending + self._stream.read()).split(b"\n")
        at = round(self.past(), 2)
        for line in lines:
            text = "".join(c if c.isprintable() else " " for c in line.decode(errors="replace")).rstrip()
            if text:
                self.start.lines.append((at, text[:600]))

    def _look(self) -> None:
        start, alive = self.start, {}
        for pid, (name, state, _) in _processes().items():
            if name in _COMPILERS and self._seen.get(pid) != name and not _asked(pid):
                start.compilers[name] = start.compilers.get(name, 0) + 1
            self._seen[pid] = name
            if name.startswith(_NAMED):
                alive[_title(pid, name)] = state
        for title, state in start.processes.items():
            if title not in alive:
                alive[title] = state if state.startswith("ended") else f"ended after {self.past():.0f} s"
        start.processes = alive


def _who(start: Start) -> str:
    """Which of the server's own processes ended, or stand still."""
    ended = [name for name, state in start.processes.items() if state.startswith("ended")]
    stopped = [name for name, state in start.processes.items() if state in ("T", "t")]
    said = [f"{name} {start.processes[name]}" for name in ended[:4]] + [f"{name} was stopped" for name in stopped]
    return f" ({'; '.join(said)})" if said else ""


def _asked(pid: int) -> bool:
    """Whether a compiler is asked for its version and nothing else, as Triton and torch do at each start.

    Triton compiles with `ptxas -v …`: one such word among others is no question.
    """
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[1:-1]
    except OSError:
        return False
    return bool(words) and _ASKS.issuperset(words)


def _title(pid: int, name: str) -> str:
    """The whole name that a process gave itself: the kernel's has 15 characters."""
    try:
        whole = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return name
    return whole[:80] if whole.startswith(_NAMED) else name


def _processes() -> dict[int, tuple[str, str, int]]:
    """Name, state and parent of every process that can be seen here."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text(errors="replace")
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            found[int(entry.name)] = (name, state, int(parent))
    return found


def _adopt() -> None:
    """Become the parent of what the server leaves behind, so that it can be found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stop(process: Process) -> None:
    """End the server as an orchestrator does, and then every process below us."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _STOP
        while process.poll() is None and time.monotonic() < until:
            time.sleep(_POLL)
    until = time.monotonic() + _STOP
    while time.monotonic() < until:
        left = _below(os.getpid())
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            if pid != process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        process.poll()
        time.sleep(_POLL)


def _below(top: int) -> list[int]:
    """All processes below one that were not ended yet."""
    table = _processes()
    found: list[int] = []
    parents = {top}
    while True:
        more = [pid for pid, (_, state, parent) in table.items() if parent in parents and pid not in found]
        if not more:
            return found
        found += more
        parents = set(more)


def files_of(top: str) -> Files:
    """Every regular file of the file system of `top`, and of what is mounted at the root of the caches."""
    found: Files = {}
    device = os.stat(top).st_dev  # noqa: PTH116
    pending = [top]
    if os.path.ismount(kinds.ROOT):
        pending.append(kinds.ROOT)
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if entry.path in _SKIPPED:
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(facts.st_mode):
                if facts.st_dev == device or entry.path.startswith(kinds.ROOT + "/"):
                    pending.append(entry.path)
            elif stat.S_ISREG(facts.st_mode):
                found[entry.path] = (facts.st_size, facts.st_mtime_ns)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _facts(spec: Spec) -> dict[str, Any]:
    """What the server's packages say of themselves; nothing where that cannot be asked."""
    if not spec.facts:
        return {}
    try:
        done = run.run(spec.facts, env={**os.environ, **spec.environment}, capture=True, timeout=300)
        value = json.loads(done.stdout.strip().splitlines()[-1])
    except (run.ProcessFailed, ValueError, IndexError) as error:
        log.note(f"the server's packages do not say what they are: {error}")
        return {}
    return dict(value) if isinstance(value, dict) else {}


def main(words: Sequence[str]) -> int:
    """Read the spec, watch, write the result; 0 unless the result cannot be written."""
    spec_file, result_file = map(Path, words)
    try:
        spec = Spec.read(json.loads(spec_file.read_text(encoding="utf-8")))
        starts, facts = watch(spec, result_file.parent)
        notes = []
        if spec.pack and starts[-1].outcome == "ready":
            notes = collect.pack(starts, facts, result_file.parent / collect.PACK, root=spec.root)
        value: dict[str, Any] = {"starts": [asdict(start) for start in starts], "facts": facts, "notes": notes}
    except run.ProgramMissing as error:
        value = {"missing": error.message}
    result_file.write_text(json.dumps(value), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
