"""Starts of a server, one after another, watched from inside its container: files, processes, log, requests.

    python3 -I <folder>/watch.py order.json result.json      (or `watch` from within a process that is there already)

Runs on the image's own Python, standard library only.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from pipeline import log, run
from pipeline.servers import collect, kinds
from pipeline.servers.starts import PORT, Spec, Start

_HEALTH = "health"  # of vLLM and SGLang
_POLL = 0.05  # seconds; a compiler of C++ or CUDA runs longer
_NOTE = 30.0
_STOP = 30.0
_COMPILERS = frozenset({"cc1plus", "cc1", "cicc", "ptxas", "ninja", "collect2", "clang", "lld"})
# What lies there is no part of an image, or changes by itself.
_SKIPPED = frozenset({"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/run"})  # noqa: S108
_ASKS = frozenset({"--version", "-dumpversion", "-dumpmachine", "-v", "-V"})
_NAMED = ("VLLM", "sglang")  # how the servers name their ranks
_PR_SET_CHILD_SUBREAPER = 36

Processes = dict[int, tuple[str, str, int]]  # number → name, state, number of its parent
Files = dict[str, tuple[int, int]]  # path → size in bytes, time of last change in ns


class Order(NamedTuple):
    """What `main` is given: the specs, and a command that prints one JSON object about the server.

    Where there is such a command, what the starts wrote is left in a tar file beside the result.
    """

    specs: tuple[Spec, ...]
    facts: tuple[str, ...] = ()

    @staticmethod
    def read(value: Mapping[str, Any]) -> Order:
        """From JSON values."""
        return Order(tuple(map(Spec.read, value["specs"])), tuple(value["facts"]))


def watch(order: Order, folder: Path) -> dict[str, Any]:
    """Make all starts, and return the result as JSON values. What they wrote goes to `folder`.

    `starts` has a list for each spec, up to the first that failed. Raises `ProgramMissing`.
    """
    # Become the parent of what a server leaves behind, so that it can be found and ended.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run.find_program(order.specs[0].command[0])
    starts: list[list[Start]] = []
    for spec in order.specs:
        starts.append(_starts(spec))
        if starts[-1][-1].outcome != "ready":
            break
    result: dict[str, Any] = {"facts": {}, "notes": []}
    if order.facts and starts[-1][-1].outcome == "ready":
        result["facts"] = facts_of(order)
        every = [start for some in starts for start in some]
        result["notes"] = collect.pack(every, result["facts"], folder / collect.PACK)
    return {**result, "starts": [[asdict(start) for start in some] for some in starts]}


def _starts(spec: Spec) -> list[Start]:
    """Start until a start writes nothing new, at most `spec.most` times."""
    starts: list[Start] = []
    before = files_of("/")
    while len(starts) < spec.most:
        number = len(starts) + 1
        log.note(f"start {number}")
        start = one_start(spec)
        after = files_of("/")
        start.new = {path: size for path, (size, _) in after.items() if path not in before}
        start.changed = {p: v[0] for p, v in after.items() if p in before and before[p] != v}
        before = after
        starts.append(start)
        if start.outcome != "ready":
            break
        new = kinds.count(start.new)
        log.note(f"start {number}: ready after {start.ready:.1f} s, {sum(new.values())} new files")
        if number > 1 and not new:
            break
    return starts


class _Failed(Exception):
    """A start that failed: its outcome, as `Start` has it, and what is said of it."""

    def __init__(self, outcome: str, said: str) -> None:
        super().__init__(said)
        self.outcome = outcome


def one_start(spec: Spec) -> Start:
    """Start the server, wait for its health, ask, stop it; whatever it left running is ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [word.replace(PORT, str(port)) for word in spec.command]
    environment = {**os.environ, **spec.environment}
    with run.spawn(words, env=environment, stdout=run.PIPE, stderr=run.STDOUT) as process:
        assert process.stdout is not None
        observer = _Observer(process.stdout)
        start = observer.start
        try:
            start.ready = _await_health(process, spec, port, observer)
            start.answers = list(_answers(spec, port))
            start.outcome = "ready"
        except _Failed as failed:
            start.outcome, start.message = failed.outcome, f"{failed}{observer.failed_rank()}"
        finally:
            observer.rest()
            _end(process)
            observer.read()
            start.seconds = observer.past()
    return start


def _await_health(process: run.Process, spec: Spec, port: int, observer: _Observer) -> float:
    """The seconds until the server said that it is well. Raises `_Failed`."""
    noted = 0.0
    while _request(port, _HEALTH, timeout=2.0)[0] != http.HTTPStatus.OK:
        past = observer.past()
        status = process.poll()
        if status is not None:
            raise _Failed("died", f"it {run.describe(status)} before it was ready")
        if past > spec.ready:
            raise _Failed("timeout", f"it was not ready within {spec.ready:.0f} s")
        if past - noted > _NOTE:
            noted = past
            log.note(f"starting for {past:.0f} s: {''.join(observer.start.tail(1))[:120]}")
        time.sleep(_POLL)
    return observer.past()


def _answers(spec: Spec, port: int) -> Iterator[float]:
    """Make the requests, and give the seconds of each. Raises `_Failed`."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {spec.token}"} if spec.token else {})}
    for ways in spec.requests:
        sent = time.monotonic()
        said = ""
        for path, body in ways:
            status, said = _request(port, path, json.dumps(body), headers, timeout=spec.answer)
            if status == http.HTTPStatus.OK:
                yield round(time.monotonic() - sent, 3)
                break
        else:
            raise _Failed("refused", f"a request got no answer: {said}")


def _request(
    port: int, path: str, body: str | None = None, headers: Mapping[str, str] | None = None, *, timeout: float
) -> tuple[int, str]:
    """The status of an answer (0 where there is none), and what it says, for a message."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET" if body is None else "POST", f"/{path}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, f"{path}: {answer.status} {answer.read(2000).decode(errors='replace')[:300]}"
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{path}: {error!r}"
    finally:
        connection.close()


class _Observer:
    """Threads that note what the server prints, with times, which compilers run, and how its ranks are."""

    def __init__(self, printed: IO[str]) -> None:
        self.start = Start()
        self._printed, self._began = printed, time.monotonic()
        self._seen: dict[int, str] = {}  # process → the program that was looked at
        self._ranks: dict[int, tuple[str, str]] = {}  # process that the server gave a title → title, state
        self._ended: list[tuple[float, str]] = []  # seconds until one of them was gone, title
        self._over = Event()
        self._threads = [Thread(target=one, daemon=True) for one in (self._listen, self._watch)]
        for thread in self._threads:
            thread.start()

    def past(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._began, 2)

    def rest(self) -> None:
        """Look at its processes no more: they will be ended."""
        self._over.set()
        self._threads[1].join()

    def read(self) -> None:
        """Take in the rest of what it printed, once all of it ended."""
        self._threads[0].join(_STOP)
        if not self._threads[0].is_alive():
            self._printed.close()

    def failed_rank(self) -> str:
        """The rank that ended first, since the others end with it, or those that are stopped; for a message."""
        self.rest()
        self._look()
        said = [f"{title} ended after {at:.0f} s" for at, title in self._ended if at == self._ended[0][0]]
        said += [f"{title} was stopped" for title, state in self._ranks.values() if state in ("T", "t")]
        return f" ({'; '.join(said)})" if said else ""

    def _listen(self) -> None:
        for line in self._printed:
            text = "".join(c if c.isprintable() else " " for c in line).rstrip()
            if text:
                self.start.lines.append((self.past(), text[:600]))

    def _watch(self) -> None:
        while not self._over.wait(_POLL):
            self._look()

    def _look(self) -> None:
        now = self.past()
        ranks: dict[int, tuple[str, str]] = {}
        table = _processes()
        for pid in _below(os.getpid(), table):
            name, state, _ = table[pid]
            if name in _COMPILERS and self._seen.get(pid) != name:
                words = _words(pid)
                if not words:
                    continue  # it begins just now: the kernel names a program before it has its arguments
                # Triton and torch ask compilers for their version at each start; Triton compiles with `ptxas -v …`.
                if len(words) < 2 or not _ASKS.issuperset(words[1:]):
                    self.start.compilers[name] = self.start.compilers.get(name, 0) + 1
            self._seen[pid] = name
            if name.startswith(_NAMED):  # 15 characters of its title; who is killed has no words
                title = next(iter(_words(pid)), "").strip()
                known = self._ranks.get(pid, (name, ""))[0]
                ranks[pid] = (title[:80] if title.startswith(name) else known, state)
        self._ended += [(now, title) for pid, (title, _) in self._ranks.items() if pid not in ranks]
        self._ranks = ranks


def _words(pid: int) -> list[str]:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _processes() -> Processes:
    """Every process that can be seen here and runs."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text(errors="replace")
            except OSError:
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state not in ("Z", "X"):
                found[int(entry.name)] = (name, state, int(parent))
    return found


def _end(process: run.Process) -> None:
    """End the server as an orchestrator does, and then every process below us."""
    process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _STOP
    while (left := _below(os.getpid(), _processes())) and time.monotonic() < until + _STOP:
        if process.poll() is not None or time.monotonic() > until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)


def _below(top: int, table: Processes) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    more = {top}
    while more:
        more = {pid for pid, (_, _, parent) in table.items() if parent in more}
        found |= more
    return found


def files_of(top: str) -> Files:
    """Every regular file of the file system of `top`, and of what is mounted at the root of the caches."""
    found: Files = {}
    device = os.stat(top).st_dev  # noqa: PTH116
    pending = [top, *([kinds.ROOT] if os.path.ismount(kinds.ROOT) else [])]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
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


def facts_of(order: Order) -> dict[str, Any]:
    """What the server's packages say of themselves; nothing where that cannot be asked."""
    environment = {**os.environ, **order.specs[0].environment}
    try:
        done = run.run(order.facts, env=environment, capture=True, timeout=300)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (run.ProcessFailed, ValueError, IndexError, TypeError) as error:
        log.note(f"the server's packages do not say what they are: {error}")
        return {}


def main(words: Sequence[str]) -> int:
    """Read the order, watch, write the result; 0 unless it cannot be written."""
    order_file, result_file = map(Path, words)
    try:
        result = watch(Order.read(json.loads(order_file.read_text(encoding="utf-8"))), result_file.parent)
        result_file.write_text(json.dumps(result), encoding="utf-8")
    except run.ProgramMissing as error:
        result_file.write_text(json.dumps({"missing": error.message}), encoding="utf-8")
    except OSError as error:
        log.line(f"what the starts wrote cannot be kept: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
