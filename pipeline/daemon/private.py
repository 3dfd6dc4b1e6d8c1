"""A Docker Engine of our own: start, stop, and put right what a killed one left. Needs root.

containerd is started beside dockerd instead of by it: dockerd would otherwise use the machine's own containerd
as soon as its socket exists, alive or not. Both are detached by start-stop-daemon, so that they outlive us and
hold none of our pipes. Callers hold `lock.locked(places.lock)`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pipeline import log
from pipeline.contract.files import write_json, write_whole
from pipeline.run import ProcessFailed, run

from . import leftovers, network, packages, procs, wire
from .errors import EngineSilent, StartFailed, StopFailed
from .places import Places
from .procs import containerd_pid, running_pid

_START = 60.0  # s; a data root with many images takes seconds
_RECONNECT = 20.0  # s; dockerd waits longer and longer between its attempts to reach containerd
_DETACH = 5.0  # s; from fork to pid file
_STOP = 30.0  # s; dockerd itself gives containers 15 s
_ROTATE = 16 << 20  # bytes


def answers(at: Places, timeout: float = 2.0) -> bool:
    """Whether this engine answers a ping."""
    try:
        wire.ping(wire.unix(at.socket), timeout=timeout)
    except OSError:
        return False
    return True


def start(at: Places, image_store: str) -> None:
    """Start containerd and dockerd and wait until the engine answers.

    Where dockerd runs and only its containerd died, that one is started again; dockerd finds it at its socket.
    Raises `EngineSilent` when a dockerd of ours runs but does not answer, `StartFailed` with the last lines of
    the log when it does not come up; then nothing is left running.
    """
    pid = running_pid(at)
    if pid is None:
        _start_both(at, image_store)
        return
    if containerd_pid(at) is None:
        log.warn("the private engine's containerd has died: starting it again")
        at.containerd_socket.unlink(missing_ok=True)
        _start_containerd(at)
    deadline = time.monotonic() + _RECONNECT
    while not _has_containerd(at):
        if time.monotonic() > deadline:
            raise EngineSilent(
                f"the private engine (process {pid}) runs but does not answer",
                hint="pipeline engine down && pipeline engine up",
                log=str(at.log),
            )
        time.sleep(0.1)


def _has_containerd(at: Places) -> bool:
    """Whether the engine answers and reaches its containerd; without it, /info has no containerd version."""
    try:
        commit = wire.get_json(wire.unix(at.socket), "/info").get("ContainerdCommit")
    except OSError:
        return False
    return isinstance(commit, dict) and commit.get("ID") not in {"", "N/A", None}


def _start_both(at: Places, image_store: str) -> None:
    sweep(at)
    for folder in (at.root, at.data, at.containerd_root, at.run):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o710 if folder == at.data else 0o700)
        except OSError as error:
            raise StartFailed(
                f"{folder} cannot be made for the private engine: {error.strerror}",
                hint="set XDG_CACHE_HOME to a folder on a local disk",
            ) from error
    try:
        _start_containerd(at)
        _start_with_network(at, image_store)
    except BaseException:
        stop(at, patience=5.0)
        raise


def _start_with_network(at: Places, image_store: str) -> None:
    """Start dockerd with the best network that it takes: what `iptables` says beforehand is not all that it needs."""
    nets = network.weaker(network.prepare(at.bridge))
    for net, next_best in zip(nets, (*nets[1:], None), strict=True):
        try:
            _start_dockerd(at, image_store, net)
        except StartFailed as error:
            if next_best is None or not network.is_to_blame(error.details):
                raise
            log.warn(f"dockerd does not start with {net}: trying {next_best} (log: {at.log})")
        else:
            return


def _start_containerd(at: Places) -> None:
    text = (
        "version = 2\n"
        f"root = {json.dumps(str(at.containerd_root))}\nstate = {json.dumps(str(at.run / 'containerd'))}\n"
        # No Kubernetes here, and no folders in /opt.
        'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
        f"[grpc]\naddress = {json.dumps(str(at.containerd_socket))}\n"
    )
    write_whole(at.containerd_config, text.encode())
    _detach("containerd", ["--config", str(at.containerd_config)], at.containerd_log, at.containerd_pid_file)
    _wait("containerd", at.containerd_socket.is_socket, at.containerd_pid_file, at.containerd_log)


def _start_dockerd(at: Places, image_store: str, net: network.Network) -> None:
    settings = {
        "data-root": str(at.data),
        "exec-root": str(at.run / "exec"),
        "pidfile": str(at.run / "exec.pid"),  # unset, it would be /var/run/docker.pid
        "hosts": [at.host],
        "containerd": str(at.containerd_socket),
        "features": {"cdi": True, "containerd-snapshotter": image_store == "containerd"},
        **net.settings(),
    }
    write_json(at.config, settings)
    _detach("dockerd", ["--config-file", str(at.config)], at.log, at.pid_file)
    _wait("dockerd", lambda: answers(at), at.pid_file, at.log)
    log.note(f"private engine started: DOCKER_HOST={at.host} (log: {at.log})")


def _detach(program: str, words: list[str], output: Path, pid_file: Path) -> None:
    """Start a program in a session of its own, its output in a log file, and return."""
    if output.is_file() and output.stat().st_size > _ROTATE:
        output.replace(output.with_suffix(".log.1"))
    pid_file.unlink(missing_ok=True)  # its old process may be a zombie, which start-stop-daemon takes for running
    found = packages.program(program)
    if found is None:
        raise StartFailed(f"{program} was not found", hint="pipeline engine up")
    command = [
        "start-stop-daemon", "--start", "--background", "--make-pidfile", "--pidfile", str(pid_file),
        "--output", str(output), "--startas", found, "--", *words,
    ]  # fmt: skip
    try:
        run(command, env=packages.search_path(), cwd=Path("/"), timeout=30)
    except ProcessFailed as error:
        raise StartFailed(f"{program} could not be started: {error.message}", details=error.details) from error


def _wait(program: str, ready: Callable[[], bool], pid_file: Path, output: Path) -> None:
    """Wait until a program that was detached is ready; raise `StartFailed` when it ended or takes too long."""
    began = time.monotonic()
    while not ready():
        waited = time.monotonic() - began
        pid = procs.read_pid(pid_file)
        # start-stop-daemon returns before its child has written the pid file and become the program.
        gone = waited > _DETACH if pid is None else not procs.alive(pid)
        if gone or waited > _START:
            what = "ended at once" if gone else f"was not ready within {_START:.0f} s"
            raise StartFailed(f"{program} {what}", details=_tail(output), log=str(output))
        time.sleep(0.02)


def _tail(path: Path, lines: int = 20) -> tuple[str, ...]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
        return tuple(line.rstrip("\n") for line in deque(stream, maxlen=lines))
    return ()


def stop(at: Places, patience: float = _STOP) -> bool:
    """Stop the engine and leave no process, mount, bridge or socket; return whether anything was running.

    Raises `StopFailed` when a process survives SIGKILL (it hangs in the kernel).
    """
    was = False
    for pid in (running_pid(at), containerd_pid(at)):
        if pid is not None:
            was = True
            if leftovers.end([pid], signal.SIGTERM, patience):
                log.warn(f"process {pid} did not end within {patience:.0f} s: ending it")
                leftovers.end([pid], signal.SIGKILL, 10.0)
    return sweep(at) or was


def sweep(at: Places) -> bool:
    """Remove what a killed engine left; return whether any process was among it."""
    folders = (at.root, at.run)
    found = leftovers.processes(folders)
    left = leftovers.end(found, signal.SIGKILL, 10.0)
    if left:
        raise StopFailed(f"process {left[0]} of the private engine cannot be ended", log=str(at.log))
    leftovers.unmount(folders)
    mounted = leftovers.mounts(folders)
    if mounted:  # never delete below something that is still mounted
        raise StopFailed(f"{mounted[0]} of the private engine cannot be unmounted", hint=f"umount {mounted[0]}")
    network.remove(at.bridge)
    shutil.rmtree(at.run, ignore_errors=True)
    return bool(found)
