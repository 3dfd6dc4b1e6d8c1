"""One start of an engine: its own serve command, as at run time, with random weights made from config.json alone.

What is changed of its words says nothing about what it computes: where it listens, and how weights are loaded. vLLM's
LoadConfig does not enter its hash, nor does SGLang's load format (both read in the published packages).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline import log, run
from pipeline.contract.errors import UsageError, WarmUpError
from pipeline.contract.plan import EngineRun
from pipeline.tune.causes import remedy
from pipeline.tune.ports import free_port
from pipeline.tune.supervise import Process

_POLL = 0.25
_ANSWER = 30.0  # seconds for an answer: SGLang generates a token first
_TOLD = 30.0  # seconds between two lines of progress
_TAIL = 30
# Options that are taken out, with the number of values each has; ours are put in their place.
_REPLACED = {"host": 1, "port": 1, "uds": 1, "load-format": 1, "ssl-keyfile": 1, "ssl-certfile": 1, "ssl-ca-certs": 1}
_REPLACED |= {"ssl-cert-reqs": 1, "skip-tokenizer-init": 0}


class EngineDied(WarmUpError):
    """The engine's process ended before it was ready."""


class EngineTooSlow(WarmUpError):
    """The engine was not ready within its bound."""


class ModelPathTaken(UsageError):
    """Another model lies where the config.json of this one belongs."""


def lay_config(run_of: EngineRun) -> None:
    """Write the model's config files to its own path, unless they lie there already. Raises `ModelPathTaken`."""
    place = Path(run_of.model)
    for name, text in sorted(run_of.config.items()):
        file = place / name
        try:
            if file.exists():
                if file.read_bytes() != text.encode():
                    raise ModelPathTaken(
                        f"{file} is another model's", hint="give the path at which this model is mounted"
                    )
                continue
            place.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
        except OSError as error:
            raise ModelPathTaken(f"{file} cannot be written: {error.strerror}", hint="name another path") from error


def command(run_of: EngineRun, port: int) -> list[str]:
    """The engine's serve command with the plan's words, our address, and dummy weights."""
    words = without(run_of.arguments)
    more = ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init"]
    if run_of.name == "vllm":
        return ["vllm", "serve", *words, *more]
    return [sys.executable, "-m", "sglang.launch_server", *words, *more]


def without(words: Sequence[str]) -> list[str]:
    """The words without those options that a start for tuning sets itself."""
    kept: list[str] = []
    skip = 0
    for word in words:
        if skip:
            skip -= 1
            continue
        name, equals, _ = word.lstrip("-").partition("=")
        values = _REPLACED.get(name.replace("_", "-")) if word.startswith("--") else None
        if values is None:
            kept.append(word)
        else:
            skip = 0 if equals else values
    return kept


@contextlib.contextmanager
def ready(run_of: EngineRun, environment: Mapping[str, str], logfile: Path, max_wait: float) -> Iterator[float]:
    """The engine from the moment it answers until the end of the block; yields the seconds that the start took.

    It sees our whole environment, as it would at run time, with the plan's variables and `environment` on top. Raises
    `EngineDied` as soon as its process ends, or `EngineTooSlow`, each with the last lines that it printed.
    """
    began = time.monotonic()
    port = free_port()
    words = command(run_of, port)
    log.note(f"start {run.spelled(words)}")
    with logfile.open("w", encoding="utf-8", errors="replace") as sink:
        whole = {**os.environ, **run_of.variables, **environment}
        with run.spawn(words, env=whole, stdout=sink, stderr=sink) as process:
            _wait(process, (run_of.name, port), logfile, max_wait)
            yield time.monotonic() - began


def _wait(process: Process, who: tuple[str, int], logfile: Path, max_wait: float) -> None:
    name, port = who
    began = said = time.monotonic()
    while True:
        status = process.poll()
        if status is not None:
            raise EngineDied(
                f"{name} {run.describe(status)} before it was ready",
                details=tail(logfile),
                hint=remedy(tail(logfile), "its own last lines are above; the same command must start in the image"),
            )
        if _answers(port):
            return
        now = time.monotonic()
        if now - began > max_wait:
            raise EngineTooSlow(
                f"{name} was not ready within {max_wait:.0f} s",
                details=tail(logfile),
                hint="raise --tune-max-wait (verify: --startup-max-wait) if the host is slow",
            )
        if now - said > _TOLD:
            said = now
            last = tail(logfile, 1)
            log.note(f"{name} starts since {now - began:.0f} s" + (f": {last[0][:120]}" if last else ""))
        time.sleep(_POLL)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(logfile: Path, lines: int = _TAIL) -> tuple[str, ...]:
    """The last lines of a log, without control characters."""
    try:
        with logfile.open("rb") as stream:
            stream.seek(max(0, logfile.stat().st_size - 64 * 1024))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ()
    found = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return tuple("".join(c if c.isprintable() else " " for c in line)[:300] for line in found)
