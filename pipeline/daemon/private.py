"""A Docker Engine of this tool's own: start it, stop it, and clean up after one that was killed. Needs root.

    <cache home>/daemon/                        shared by all checkouts of one user
        lock                                    held while one process installs, starts, stops or removes
        daemon.json, containerd.toml            configuration; the image store is remembered in the first
        data/, containerd/                      images and build cache
        dockerd.log, containerd.log, apt.log
    /run/tuned-image-pipeline/<id>/             sockets and state, gone after a reboot; <id> from the path above

A socket's path may have 107 bytes only and a cache folder may be deep, hence the second folder. containerd is started
beside dockerd because dockerd would otherwise use the machine's own containerd. Callers hold the lock, except of
`running`. Containers and build steps run without a network, so the engine has none: no iptables rules, no bridge.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import DockerError
from pipeline.contract.files import write_json, write_whole
from pipeline.home import cache_home
from pipeline.run import ProcessFailed, run

from .debian import program

_RUN = Path("/run/tuned-image-pipeline")
_START = 60.0  # s; a data root with many images takes seconds
_STOP = 30.0  # s; dockerd itself gives containers 15 s
_DETACH = 2.0  # s; from fork to exec
_ROTATE = 16 << 20  # bytes of a log
_BUILD_CACHE = "40GB"  # what BuildKit's garbage collection keeps
_PROGRAMS = re.compile(r"(dockerd|containerd|containerd-shim.*|runc|buildkit-runc|docker-init|docker-proxy|setsid)")
_STORES = {"classic": False, "containerd": True}


@dataclass(frozen=True)
class Folders:
    """The two folders of a private engine: what stays, and what a reboot may empty."""

    root: Path
    run: Path

    @property
    def lock(self) -> Path:
        """Held while one process installs, starts, stops or removes."""
        return self.root / "lock"

    @property
    def config(self) -> Path:
        """dockerd's configuration."""
        return self.root / "daemon.json"

    @property
    def log(self) -> Path:
        """dockerd's log."""
        return self.root / "dockerd.log"

    @property
    def socket(self) -> Path:
        """The engine's socket."""
        return self.run / "docker.sock"

    @property
    def host(self) -> str:
        """The engine's address, as DOCKER_HOST takes it."""
        return f"unix://{self.socket}"

    @property
    def bridge(self) -> str:
        """A network bridge of the engine's own, only made where docker0 is another engine's. At most 15 bytes."""
        return f"tip{self.run.name}"


def folders(home: Path | None = None) -> Folders:
    """The folders of the private engine below `home` (default: this user's cache folder)."""
    root = (home or cache_home()).absolute() / "daemon"
    return Folders(root, _RUN / sha256_bytes(str(root).encode())[:8])


def store(at: Folders) -> str:
    """The image store that the engine was last started with; `classic` before the first start."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        features = json.loads(at.config.read_text(encoding="utf-8")).get("features", {})
        return "containerd" if features.get("containerd-snapshotter") else "classic"
    return "classic"


def processes(at: Folders) -> dict[int, str]:
    """The engine's processes and those in its containers and build steps: process id to name. Zombies are left out.

    An engine's process names its folders on the command line; one in a container or a build step has a root file system
    below them.
    """
    folders = [os.fsencode(folder) + b"/" for folder in (at.root, at.run)]
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError):
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            names = [os.path.basename(os.fsdecode(word)) for word in words[:2]]  # noqa: PTH119 - the second of a script
            name = next((n for n in names if _PROGRAMS.fullmatch(n)), "")
            ours = name and any(word.removeprefix(b"unix://").startswith(f) for word in words for f in folders)
            if ours or (words != [b""] and any(f in _root_mount(entry) for f in folders)):
                found[int(entry.name)] = name or names[0]
    return found


def _root_mount(process: Path) -> bytes:
    """The line of mountinfo for a process's root file system (proc(5)), unescaped."""
    for line in (process / "mountinfo").read_bytes().splitlines():
        if line.split()[4] == b"/":
            return _unescaped(line)
    return b""


def _unescaped(text: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), text)


def running(at: Folders) -> bool:
    """Whether both programs of the engine listen."""
    return _listens(at.socket) and _listens(at.run / "containerd.sock")


def _listens(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        connection.connect(str(path))
        return True
    return False


def _answers(at: Folders) -> bool:
    """Whether the engine answers a ping."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        connection.connect(str(at.socket))
        connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        return b" 200 " in connection.recv(64)
    return False


def start(at: Folders, image_store: str) -> None:
    """Start containerd and dockerd and wait until the engine answers; an engine that runs is left alone.

    Raises `DockerError` with the last lines of the log when it does not come up; then nothing is left running.
    """
    if running(at):
        if not _in_time(lambda: _answers(at), 20.0):
            raise DockerError(
                "the private Docker Engine runs but does not answer",
                hint="`pipeline daemon down`, then `pipeline daemon up`",
                log=str(at.log),
            )
        return
    sweep(at)
    try:
        for folder in (at.root, at.root / "data", at.root / "containerd", at.run):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o710 if folder.name == "data" else 0o700)
        toml = (
            "version = 2\n"
            f"root = {json.dumps(str(at.root / 'containerd'))}\nstate = {json.dumps(str(at.run / 'containerd'))}\n"
            # No Kubernetes here, and no folders in /opt.
            'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
            f"[grpc]\naddress = {json.dumps(str(at.run / 'containerd.sock'))}\n"
        )
        write_whole(at.root / "containerd.toml", toml.encode())
        write_json(at.config, _settings(at, image_store))
    except OSError as error:
        raise DockerError(
            f"{error.filename} cannot be created for the private Docker Engine: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder on a local disk",
        ) from error
    try:
        _launch("containerd", "--config", str(at.root / "containerd.toml"), at=at)
        _wait("containerd", (at.run / "containerd.sock").is_socket, at)
        _launch("dockerd", "--config-file", str(at.config), at=at)
        _wait("dockerd", lambda: _answers(at), at)
    except BaseException:
        stop(at, timeout=5.0)
        raise
    log.note(f"private Docker Engine started: DOCKER_HOST={at.host} (log: {at.log})")


def _settings(at: Folders, image_store: str) -> dict[str, object]:
    return {
        "data-root": str(at.root / "data"),
        "exec-root": str(at.run / "exec"),
        "pidfile": str(at.run / "dockerd.pid"),  # unset, it would be /var/run/docker.pid
        "hosts": [at.host],
        "containerd": str(at.run / "containerd.sock"),
        "features": {"cdi": True, "containerd-snapshotter": _STORES[image_store]},
        "builder": {"gc": {"enabled": True, "defaultKeepStorage": _BUILD_CACHE}},
        "bridge": _bridge(at),
        "iptables": False,
        "ip6tables": False,
    }


def _bridge(at: Folders) -> str:
    """`none`; a bridge where there is a docker0, which dockerd with `none` deletes although it is another engine's."""
    if not Path("/sys/class/net/docker0").exists():
        return "none"
    if not (Path("/sys/class/net") / at.bridge).exists():
        run(["ip", "link", "add", at.bridge, "type", "bridge"], timeout=30)
    return at.bridge


def _launch(name: str, *words: str, at: Folders) -> None:
    """Start a program in a session of its own, so that it outlives this process, with its output in a log."""
    output = at.root / f"{name}.log"
    if output.is_file() and output.stat().st_size > _ROTATE:
        output.replace(output.with_suffix(".log.1"))
    found = program(name)
    if found is None:
        raise DockerError(f"{name} was not found", hint="`pipeline daemon up` as root installs it on Debian")
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    script = 'log=$1; shift; exec setsid --fork "$@" >>"$log" 2>&1 </dev/null'
    try:
        run(["sh", "-c", script, "sh", str(output), found, *words], env={"PATH": path}, cwd=Path("/"), timeout=30)
    except ProcessFailed as error:
        raise DockerError(f"{name} could not be started: {error.message}", details=error.details) from error


def _in_time(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _wait(name: str, ready: Callable[[], bool], at: Folders) -> None:
    """Wait until a program that was launched is ready; raise `DockerError` when it ended or takes too long."""
    began = time.monotonic()

    def over() -> bool:
        return ready() or (time.monotonic() - began > _DETACH and name not in processes(at).values())

    in_time = _in_time(over, _START)
    if not ready():
        output = at.root / f"{name}.log"
        what = "ended at once" if in_time else f"was not ready within {_START:.0f} s"
        raise DockerError(f"{name} {what}", details=_tail(output), log=str(output))


def _tail(path: Path, lines: int = 20) -> tuple[str, ...]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
        return tuple(line.rstrip("\n") for line in deque(stream, maxlen=lines))
    return ()


def stop(at: Folders, timeout: float = _STOP) -> bool:
    """Stop the engine and leave no process, mount, bridge or socket; return whether anything was running.

    Raises `DockerError` when a process survives SIGKILL (it hangs in the kernel).
    """
    was = bool(processes(at))
    for name in ("dockerd", "containerd"):
        for pid in (pid for pid, found in processes(at).items() if found == name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not _in_time(lambda name=name: name not in processes(at).values(), timeout):  # type: ignore[misc]
            log.warn(f"{name} did not end within {timeout:.0f} s: killing it")
    sweep(at)
    return was


def sweep(at: Folders) -> None:
    """Remove what a killed engine left: processes, mounts, a bridge, sockets."""

    def gone() -> bool:
        found = processes(at)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    if not _in_time(gone, 10.0):
        raise DockerError(
            f"process {next(iter(processes(at)), 0)} of the private Docker Engine cannot be ended", log=str(at.log)
        )
    for where in _mounts(at):
        run(["umount", "--lazy", where], accept=range(256), timeout=30)
    mounted = next(_mounts(at), None)
    if mounted is not None:  # never delete below something that is still mounted
        raise DockerError(f"{mounted} of the private Docker Engine cannot be unmounted", hint=f"umount {mounted}")
    if (Path("/sys/class/net") / at.bridge).exists():
        run(["ip", "link", "delete", at.bridge], accept=range(256), timeout=30)
    shutil.rmtree(at.run, ignore_errors=True)


def _mounts(at: Folders) -> Iterator[str]:
    """Mount points below the engine's folders, the latest first, as they must be unmounted."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
    for point in reversed([Path(os.fsdecode(_unescaped(point))) for point in points]):
        if point.is_relative_to(at.root) or point.is_relative_to(at.run):
            yield str(point)
