"""The private engine's bookkeeping: places, lock, stale pid files, leftovers, network, and buildx beside an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.exits import Exit
from pipeline.daemon import buildx, errors, flow, leftovers, network, packages, private, procs, state, wire
from pipeline.daemon.builders import check_builder
from pipeline.daemon.errors import BuilderElsewhere
from pipeline.daemon.facts import Answers, Engine, engine_from
from pipeline.daemon.lock import locked
from pipeline.daemon.places import Places, places
from pipeline.run import Finished, ProcessFailed, run

ROOT = Path(__file__).resolve().parents[2]
WAITS = "echo; read line"  # a shell says that it is there and waits until its stdin closes


@pytest.fixture
def named(tmp_path: Path) -> Iterator[Any]:
    """Start a process that looks like a given program with given arguments in /proc."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *words: str, code: str = WAITS) -> subprocess.Popen[str]:
        command = [f"/usr/sbin/{program}", "-c", code, *words]
        process = subprocess.Popen(
            command, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def at(tmp_path: Path) -> Places:
    made = Places(tmp_path / "engine", tmp_path / "run" / "1a2b3c4d")
    made.root.mkdir()
    made.run.mkdir(parents=True)
    return made


def test_one_engine_a_cache_folder_and_its_socket_path_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "deep/" * 60)
    deep = places()
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    other = places()
    assert deep.host != other.host
    assert wire.parse_address(deep.host, "private").path == str(deep.socket)
    assert len(deep.bridge) <= 15
    assert places() == other


def test_a_pid_file_counts_only_while_that_very_program_runs(at: Places, named: Any) -> None:
    assert procs.running_pid(at) is None
    at.pid_file.write_text("garbage")
    assert procs.running_pid(at) is None
    at.pid_file.write_text(f"{os.getpid()}\n")  # a pid that was used again
    assert procs.running_pid(at) is None
    elsewhere = named("dockerd", "--config-file", "/etc/docker/daemon.json")
    at.pid_file.write_text(f"{elsewhere.pid}\n")
    assert procs.running_pid(at) is None
    ours = named("dockerd", "--config-file", str(at.config))
    at.pid_file.write_text(f"{ours.pid}\n")
    assert procs.running_pid(at) == ours.pid
    ours.kill()
    deadline = time.monotonic() + 60
    while procs.alive(ours.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert procs.running_pid(at) is None  # a zombie: dead, and nobody has asked for its status yet


def test_leftovers_are_ours_and_what_they_started_and_nothing_else(at: Places, named: Any, tmp_path: Path) -> None:
    folders = (at.root, at.run)
    shim = named("containerd-shim-runc-v2", "-namespace", "moby", "-address", str(at.containerd_socket))
    other = named("containerd-shim-runc-v2", "-address", str(tmp_path / "run" / "1a2b3c4d5" / "containerd.sock"))
    editor = named("editor", str(at.config))  # names our folder and is none of ours
    runc = named("runc", "run", "--bundle", str(at.data / "buildkit"), code=f"sh -c '{WAITS}'; true")
    found = leftovers.processes(folders)
    children = [pid for pid in procs.all_pids() if procs.parent(pid) == runc.pid]
    assert len(children) == 1
    assert set(found) == {shim.pid, runc.pid, *children}
    assert leftovers.end(found, signal.SIGKILL, 60.0) == ()
    assert leftovers.processes(folders) == ()
    assert other.poll() is None
    assert editor.poll() is None


def test_ending_is_bounded_and_names_what_stays(named: Any) -> None:
    began = time.monotonic()
    process = named("dockerd", code=f"trap '' TERM; {WAITS}")
    assert leftovers.end([process.pid], signal.SIGTERM, 0.2) == (process.pid,)
    assert time.monotonic() - began < 60


MOUNTINFO = rb"""21 1 8:1 / / rw - ext4 /dev/vda rw
30 21 0:40 / /c/engine/data rw - ext4 /dev/vda rw
31 30 0:41 / /c/engine/data/overlay2/a\040b/merged rw - overlay overlay rw,lowerdir=/x,upperdir=/c/engine/u
32 21 0:42 / /c/engine2/data rw - tmpfs tmpfs rw
33 21 0:4 net:[1] /run/t/\303\274/netns/x rw - nsfs nsfs rw
"""


def test_mounts_are_ours_alone_deepest_first_and_unescaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_bytes(MOUNTINFO)
    monkeypatch.setattr(leftovers, "PROC", tmp_path)
    assert leftovers.mounts((Path("/c/engine"), Path("/run/t"))) == (
        "/run/t/ü/netns/x",
        "/c/engine/data/overlay2/a b/merged",
        "/c/engine/data",
    )


@pytest.mark.parametrize(("upper", "ours"), [("/c/engine/overlay2/x/diff", True), ("/c/engine2/x", False)])
def test_a_process_whose_root_is_one_of_our_layers_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: str, ours: bool
) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cmdline").write_bytes(b"/bin/sleep\0" + b"777\0")
    (tmp_path / "77" / "mountinfo").write_text(
        f"40 21 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/c/engine/l,upperdir={upper},workdir=/w\n"
    )
    monkeypatch.setattr(leftovers, "PROC", tmp_path)
    monkeypatch.setattr(procs, "PROC", tmp_path)
    assert leftovers.processes((Path("/c/engine"),)) == ((77,) if ours else ())


def test_the_lock_is_held_by_one_and_says_by_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "deep" / "lock"
    order: list[str] = []

    def second() -> None:
        with locked(lock):
            order.append("second")

    with locked(lock):
        with (
            pytest.raises(errors.EngineBusy, match=f"held by process {os.getpid()}") as caught,
            locked(lock, patience=0.2),
        ):
            pytest.fail("two hold the lock")
        waiter = threading.Thread(target=second)
        waiter.start()
        time.sleep(0.3)
        order.append("first")
    waiter.join()
    assert order == ["first", "second"]
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert f"waiting for process {os.getpid()}" in capsys.readouterr().err


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "from pathlib import Path; from pipeline.daemon.lock import locked\n"
        f"with locked(Path({str(lock)!r})): print(flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(errors.EngineBusy, match=f"held by process {holder.pid}"), locked(lock, patience=0.0):
        pytest.fail("two hold the lock")
    holder.kill()
    holder.communicate()
    with locked(lock, patience=0.0):
        pass


@pytest.mark.parametrize(
    ("programs", "another", "expected", "warning"),
    [
        ({"ip", "iptables"}, False, network.Network("tipx", nat=True), ""),
        ({"ip"}, False, network.Network("tipx", nat=False), "iptables does not work here"),
        ({"ip", "iptables"}, True, network.Network("tipx", nat=False), "another dockerd runs here"),
        (set(), False, network.NO_NETWORK, "no network bridge"),
    ],
)
def test_the_network_is_as_good_as_the_host_allows(
    programs: set[str], another: bool, expected: network.Network, warning: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def answer(command: list[str], **_: Any) -> Finished:
        if Path(command[0]).name not in programs:
            raise ProcessFailed(command, 1, [])
        return Finished(0, "", ())

    monkeypatch.setattr(network, "run", answer)
    monkeypatch.setattr(packages, "program", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(network, "_another_engine", lambda: another)
    assert network.prepare("tipx") == expected
    assert (warning in capsys.readouterr().err) is True


@pytest.mark.parametrize(
    ("words", "failing", "another", "used"),
    [
        ("Error initializing network controller: iptables v1.8.9 (nf_tables)", {"True tipx"}, False, "False tipx"),
        ("Error creating default bridge network", {"True tipx", "False tipx"}, False, "False none"),
        ("Error creating default bridge network", {"True tipx", "False tipx"}, True, None),
        ("no space left on device", {"True tipx"}, False, None),
    ],
)
def test_dockerd_gets_the_best_network_that_it_takes(
    words: str, failing: set[str], another: bool, used: str | None, at: Places,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tried: list[str] = []

    def start(_at: Places, _store: str, net: network.Network) -> None:
        tried.append(f"{net.nat} {net.bridge or 'none'}")
        if tried[-1] in failing:
            raise errors.StartFailed("dockerd ended at once", details=["level=info", words])

    monkeypatch.setattr(private, "_start_dockerd", start)
    monkeypatch.setattr(network, "prepare", lambda _name: network.Network("tipx", nat=True))
    monkeypatch.setattr(network, "_another_engine", lambda: another)
    if used is None:
        with pytest.raises(errors.StartFailed):
            private._start_with_network(at, "classic")
    else:
        private._start_with_network(at, "classic")
        assert tried[-1] == used
        assert "dockerd does not start with bridge tipx, with iptables" in capsys.readouterr().err


def test_without_a_bridge_dockerd_is_told_so() -> None:
    assert network.NO_NETWORK.settings() == {"bridge": "none", "iptables": False, "ip6tables": False}


@pytest.mark.parametrize(
    ("text", "store"),
    [
        (None, "classic"), ("{", "classic"), ("[]", "classic"), ("{}", "classic"),
        ('{"features": {"containerd-snapshotter": false}}', "classic"),
        ('{"features": {"containerd-snapshotter": true}}', "containerd"),
    ],
)  # fmt: skip
def test_the_store_of_the_last_start_is_remembered(at: Places, text: str | None, store: str) -> None:
    if text is not None:
        at.config.write_text(text)
    assert state.store(at) == store


def test_the_size_is_counted_within_a_budget(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "file").write_bytes(b"x" * 100_000)
    size, complete = state._size(tmp_path, 10.0)
    assert complete
    assert size >= 100_000
    assert state._size(tmp_path, -1.0) == (0, False)
    assert state._size(tmp_path / "none", 1.0) == (0, True)


def engine(store: str, host: str = "unix:///x.sock") -> Engine:
    status = [["driver-type", "io.containerd.snapshotter.v1"]] if store == "containerd" else []
    return engine_from(host, "private", Answers({"ServerVersion": "26.1.5", "DriverStatus": status}, "1.45"))


def test_another_store_is_refused_with_the_command_that_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildx, "version", lambda: (0, 13, 1))
    monkeypatch.setattr(flow, "find", lambda: engine("classic", places().host))
    assert flow.up("classic").store == "classic"
    assert flow.up(None).store == "classic"
    assert flow.ensure("containerd").store == "classic"  # only an engine that must be started gets the store
    with pytest.raises(errors.StoreDiffers, match="runs with the classic store") as caught:
        flow.up("containerd")
    assert caught.value.hint == "pipeline engine down && pipeline engine up --store containerd"
    monkeypatch.setattr(flow, "find", lambda: engine("containerd"))
    with pytest.raises(errors.StoreDiffers) as caught:
        flow.up("classic")
    assert '"containerd-snapshotter": false' in caught.value.hint


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("github.com/docker/buildx v0.29.1 a32761aeb3debd39be1eca514af3693af0db334b", (0, 29, 1)),
        ("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", (0, 13, 1)),
        ("github.com/docker/buildx v0.30.0-desktop.1", (0, 30, 0)),
        ("nothing", None),
    ],
)
def test_versions_of_buildx(text: str, version: object) -> None:
    assert buildx.parse_version(text) == version


def test_what_a_version_of_buildx_can_do() -> None:
    old, new = buildx.abilities((0, 13, 1)), buildx.abilities((0, 29, 1))
    assert (old.outline, dict(old.outline_env)) == (("--print=outline,format=json",), {"BUILDX_EXPERIMENTAL": "1"})
    assert (new.outline, dict(new.outline_env)) == (("--call=outline,format=json",), {})
    assert (old.allow_device, old.check, old.shm_size) == (False, False, True)
    assert (new.allow_device, new.check, new.shm_size) == (True, True, True)
    assert buildx.abilities((0, 21, 9)).allow_device is False


def test_builds_go_to_the_engine_itself_whatever_builder_is_current() -> None:
    env = buildx.environment(engine("classic"))
    assert (env["DOCKER_HOST"], env["BUILDX_BUILDER"], env["DOCKER_CONTEXT"]) == ("unix:///x.sock", "default", "")


@pytest.mark.parametrize("driver", ["kubernetes", "remote", "docker-container"])
def test_a_builder_that_is_not_the_engine_s_own_is_refused_or_left_alone_by_name(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files as buildx 0.13.1 writes them."""
    folder = tmp_path / "buildx"
    (folder / "instances").mkdir(parents=True)
    (folder / "instances" / "farm").write_text(json.dumps({"Name": "farm", "Driver": driver, "Nodes": []}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("BUILDX_CONFIG", raising=False)
    monkeypatch.setattr(flow, "find", lambda: pytest.fail("the engine is asked only afterwards"))
    monkeypatch.setenv("BUILDX_BUILDER", "farm")
    with pytest.raises(BuilderElsewhere, match=f"names farm, a builder of the {driver} driver") as caught:
        flow.ensure()
    assert caught.value.exit_code == Exit.NO_DOCKER and "DOCKER_HOST=ssh://" in caught.value.hint
    for harmless in ("default", "nosuch", "../instances/farm", ""):
        check_builder({"DOCKER_CONFIG": str(tmp_path), "BUILDX_BUILDER": harmless})
    assert capsys.readouterr().err == ""
    (folder / "current").write_text('{"Key":"unix:///var/run/docker.sock","Name":"farm","Global":false}')
    check_builder({"BUILDX_CONFIG": str(folder)})
    assert f"buildx builder farm ({driver} driver) is not used" in capsys.readouterr().err


class Docker:
    """A docker command with a buildx plugin, both as files that say what they were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.program = folder / "calls", folder / "bin" / "docker"
        self.plugin = folder / "config" / "cli-plugins" / "docker-buildx"
        for file in (self.program, self.plugin):
            file.parent.mkdir(parents=True)
        self.says("echo github.com/docker/buildx v0.29.1 abc")
        monkeypatch.setenv("PATH", f"{self.program.parent}:/usr/bin:/bin")
        monkeypatch.setenv("DOCKER_CONFIG", str(folder / "config"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def says(self, answer: str) -> None:
        self.program.write_text(f"#!/bin/sh\necho $* >> {self.calls}\n{answer}\n")
        self.program.chmod(0o755)
        self.plugin.touch()

    def asked(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    return Docker(tmp_path, monkeypatch)


def test_buildx_is_asked_once_and_again_when_a_program_changes(docker: Docker) -> None:
    assert [buildx.version() for _ in range(3)] == [(0, 29, 1)] * 3
    assert docker.asked() == 1
    docker.says("echo github.com/docker/buildx v0.30.2 abcdef")
    assert buildx.version() == (0, 30, 2)
    assert docker.asked() == 2


@pytest.mark.parametrize("memory", ["{", "[]", '{"programs": 1}', '{"version": ["x"]}'])
def test_a_spoilt_memory_of_buildx_is_not_believed(docker: Docker, memory: str, tmp_path: Path) -> None:
    buildx.version()
    kept = tmp_path / "cache" / "tuned-image-pipeline" / "buildx.json"
    assert json.loads(kept.read_text())["version"] == [0, 29, 1]
    kept.write_text(memory)
    assert buildx.version() == (0, 29, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo \"docker: 'buildx' is not a docker command.\" >&2; exit 1", "no buildx plugin"),
        ("echo github.com/docker/buildx v0.9.1 abc", r"buildx is 0\.9\.1; 0\.10\.0 or newer"),
        ("echo hello", "of unknown version"),
    ],
)
def test_a_missing_or_old_buildx_says_how_to_get_it(docker: Docker, answer: str, words: str) -> None:
    docker.says(answer)
    with pytest.raises(errors.BuildxMissing, match=words) as caught:
        buildx.version()
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert "install docker-buildx" in caught.value.hint


def test_no_docker_command_at_all(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(errors.BuildxMissing, match="docker command is not on PATH"):
        buildx.version()


def test_buildx_missing_beside_an_answering_engine_is_installed_by_root_on_debian(
    docker: Docker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker.says("exit 1")
    monkeypatch.setattr(flow, "find", lambda: engine("classic"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(errors.BuildxMissing):
        flow.ensure()
    installed: list[tuple[str, ...]] = []

    def install(_system: object, names: tuple[str, ...], _log: Path) -> None:
        installed.append(names)
        docker.says("echo github.com/docker/buildx 0.13.1+ds1 abc")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "install", install)
    monkeypatch.setattr(packages, "supported", lambda _system: True)
    assert flow.ensure().version == "26.1.5"
    assert installed == [("docker-buildx",)]
    said = capsys.readouterr().err
    assert "answers, but the docker command has no buildx plugin" in said
    assert "buildx 0.13.1" in said


def test_finding_an_engine_imports_neither_the_sdk_nor_what_starts_one() -> None:
    heavy = "{'docker', 'requests', 'subprocess', 'pydantic', 'rich', 'http.client', 'ssl', 'pipeline.daemon.private'}"
    code = f"import sys; from pipeline.daemon import find; find(); print(sorted({heavy} & set(sys.modules)))"
    env = {"DOCKER_HOST": "", "DOCKER_CONFIG": "/nowhere", "XDG_CACHE_HOME": "/nowhere"}
    assert run([sys.executable, "-c", code], cwd=ROOT, env=env, capture=True).stdout == "[]\n"
