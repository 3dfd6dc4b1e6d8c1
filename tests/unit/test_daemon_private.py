"""Locks, what is installed and removed again, and which processes are a private engine's. No engine runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import daemon
from pipeline.contract.errors import DockerError, WarmUpError
from pipeline.daemon import debian, device_lock, locked, private
from pipeline.daemon.private import Folders
from pipeline.run import run

ROOT = Path(__file__).resolve().parents[2]


def holder(code: str) -> subprocess.Popen[bytes]:
    """A process that holds a lock until its stdin closes."""
    text = f"from pathlib import Path\nfrom pipeline.daemon import *\nwith {code}: print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_lock_is_held_by_one_says_by_whom_and_goes_with_a_killed_holder(tmp_path: Path) -> None:
    lock = tmp_path / "deep" / "lock"
    process = holder(f"locked(Path({str(lock)!r}), 'it')")
    with (
        pytest.raises(DockerError, match=rf"it is in use by process {process.pid} \(-c, since 2\d") as caught,
        locked(lock, "it", wait=0.2),
    ):
        pytest.fail("two hold the lock")
    assert str(lock) in caught.value.hint
    process.kill()
    process.communicate()
    with locked(lock, "it", wait=0.0):
        assert lock.stat().st_mode & 0o777 == 0o666


def test_a_waiting_process_says_so_and_goes_on_when_the_lock_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def second() -> None:
        with device_lock(["cpu"], folder=tmp_path):
            order.append("second")

    with device_lock(["cpu"], folder=tmp_path):
        waiter = threading.Thread(target=second)
        waiter.start()
        time.sleep(0.3)
        order.append("first")
    waiter.join()
    assert order == ["first", "second"]
    said = capsys.readouterr().err
    assert f"waiting up to 3600 s for process {os.getpid()} (" in said and "which uses the CPU" in said


def test_a_device_is_locked_by_itself_and_two_orders_never_wait_for_each_other(tmp_path: Path) -> None:
    process = holder(f"device_lock(['GPU-b', 'GPU-a'], folder=Path({str(tmp_path)!r}))")
    try:
        for free in (["cpu"], ["GPU-c"]):
            with device_lock(free, wait=0.0, folder=tmp_path):
                pass
        with device_lock(["GPU-a"], machine="elsewhere", wait=0.0, folder=tmp_path):
            pass
        with (
            pytest.raises(WarmUpError, match=f"GPU GPU-a is in use by process {process.pid}"),
            device_lock(["GPU-c", "GPU-a"], wait=0.1, folder=tmp_path),
        ):
            pytest.fail("two hold the lock")
    finally:
        process.communicate(b"\n")
    with device_lock(["GPU-a", "GPU-b"], wait=0.0, folder=tmp_path):
        pass


def test_the_owner_of_a_lock_is_named_without_what_may_be_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["/x/pipeline", "build", "--server-args=--api-key sk-1", "tiny", "sk-2 x"]
    monkeypatch.setattr(sys, "argv", words)
    with locked(tmp_path / "lock", "it"):
        found = json.loads((tmp_path / "lock").read_text())
    assert found["command"] == "pipeline build tiny"


class Apt:
    """Stands for the programs of a Debian machine: what they are asked is kept, and packages come and go."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.state = folder, folder / "state"
        self.set(
            installed="bash curl", sources="bookworm http://m.example/debian/\nbookworm-security http://m.example/sec"
        )
        scripts = {
            "apt-get": f"""
                echo "$@" >> {folder}/asked
                case "$*" in
                  indextargets*) while read suite uri; do echo "$suite main $uri"; done < {folder}/sources ;;
                  *--simulate*" install "*) for p in docker.io dep; do echo "Inst $p (1 Debian)"; done; echo "Inst old [1] (2 D)" ;;
                  *--simulate*" remove "*) for p in $(cat {folder}/goes); do echo "Remv $p [1]"; done ;;
                  *fail*) echo E: Unable to locate package fail; exit 100 ;;
                  *install*) echo bash curl docker.io dep > {folder}/installed; [ ! -x {debian_policy(folder)} ] ||
                             {debian_policy(folder)} docker start; echo $? > {folder}/policy ;;
                  *remove*) echo bash curl > {folder}/installed ;;
                esac""",
            "dpkg-query": f'for p in $(cat {folder}/installed); do echo "$p installed"; done',
            "systemctl": f'echo "systemctl $@" >> {folder}/asked',
            "update-rc.d": ":",
        }
        (folder / "bin").mkdir()
        for name, text in scripts.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        for name in ("KEYRING", "NEWER_KEY"):
            (folder / name).touch()
            monkeypatch.setattr(debian, name, folder / name)
        monkeypatch.setattr(debian, "STATE", self.state)
        monkeypatch.setattr(debian, "APT", folder / "apt")
        monkeypatch.setattr(debian, "POLICY", debian_policy(folder))
        system = {"ID": "debian", "VERSION_ID": "12", "VERSION_CODENAME": "bookworm"}
        monkeypatch.setattr(debian, "_system", lambda: system)
        self.system = system

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(f"{text}\n")

    def asked(self) -> list[str]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [line.replace("-q -o DPkg::Lock::Timeout=300 ", "") for line in lines if "--format" not in line]


def debian_policy(folder: Path) -> Path:
    return folder / "policy-rc.d"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    return Apt(tmp_path, monkeypatch)


def test_what_is_installed_is_recorded_and_removed_again_with_source_and_pin(
    apt: Apt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "apt.log"
    debian.install(["docker.io"], log, newer_suite=True)
    source = tmp_path / "apt" / "sources.list.d" / "tuned-image-pipeline.sources"
    pin = tmp_path / "apt" / "preferences.d" / "tuned-image-pipeline"
    assert "URIs: http://m.example/debian\nSuites: trixie trixie-updates\n" in source.read_text()
    assert "URIs: http://m.example/sec\nSuites: trixie-security\n" in source.read_text()
    assert "Package: *\nPin: release n=trixie*\nPin-Priority: 100\n" in pin.read_text()
    assert (
        "docker.io docker-cli docker-buildx containerd\nPin: release n=trixie*\nPin-Priority: 500\n" in pin.read_text()
    )
    assert "2 packages are new on this machine; `pipeline daemon remove`" in capsys.readouterr().err
    assert debian.recorded() == ("dep", "docker.io")  # a dependency too, and not what was only upgraded
    assert (tmp_path / "policy").read_text() == "101\n"  # package scripts may not start docker …
    assert not debian_policy(tmp_path).exists()  # … while packages are installed
    assert any(line.startswith("systemctl disable docker.service") for line in apt.asked())
    apt.set(goes="docker.io dep")
    assert debian.remove(log) == ("dep", "docker.io")
    assert "remove -y dep docker.io" in apt.asked()
    assert not source.exists() and not pin.exists() and debian.recorded() == ()
    assert debian.remove(log) == ()


def test_packages_that_others_need_by_now_are_not_removed(apt: Apt, tmp_path: Path) -> None:
    debian.install(["docker.io"], tmp_path / "log")
    apt.set(goes="docker.io dep compose")
    with pytest.raises(DockerError, match="other packages need what was installed here: compose"):
        debian.remove(tmp_path / "log")
    assert debian.recorded() == ("dep", "docker.io")


def test_a_newer_suite_that_the_host_has_already_is_used_as_it_is(apt: Apt, tmp_path: Path) -> None:
    apt.set(sources="bookworm http://m.example/debian\ntrixie http://m.example/debian")
    debian.install(["docker.io"], tmp_path / "log", newer_suite=True)
    assert not (tmp_path / "apt" / "sources.list.d").exists()
    assert "Package: *" not in (tmp_path / "apt" / "preferences.d" / "tuned-image-pipeline").read_text()
    assert debian.mirrors("trixie") == ("http://m.example/debian",)


def test_a_host_without_a_mirror_gets_nothing_written(apt: Apt, tmp_path: Path) -> None:
    apt.set(sources="bullseye http://m.example/debian")
    with pytest.raises(DockerError, match="no mirror for bookworm main"):
        debian.install(["docker.io"], tmp_path / "log", newer_suite=True)
    assert not (tmp_path / "apt").exists()


def test_a_failed_install_shows_apts_own_words(apt: Apt, tmp_path: Path) -> None:
    with pytest.raises(DockerError, match="apt could not install fail") as caught:
        debian.install(["fail"], tmp_path / "apt.log")
    assert caught.value.details == ("E: Unable to locate package fail",)
    assert caught.value.log == str(tmp_path / "apt.log")
    assert not debian_policy(tmp_path).exists()


@pytest.mark.parametrize(
    ("system", "known"),
    [
        ({"ID": "debian", "VERSION_ID": "13"}, True), ({"ID": "debian"}, True), ({"ID": "debian", "VERSION_ID": "11"}, False),
        ({"ID": "ubuntu", "VERSION_ID": "24.04"}, True), ({"ID": "rocky", "VERSION_ID": "9.4"}, False), ({}, False),
    ],
)  # fmt: skip
def test_systems_on_which_packages_can_be_installed(apt: Apt, system: dict[str, str], known: bool) -> None:
    apt.system.clear()
    apt.system.update(system)
    assert debian.supported() is known


@pytest.fixture
def at(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "daemon", tmp_path / "run" / "1a2b3c4d")
    made.root.mkdir()
    made.run.mkdir(parents=True)
    return made


@pytest.fixture
def named() -> Iterator[Any]:
    """Start a process that looks like a given program with given arguments in /proc."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *words: str) -> int:
        command = [f"/usr/sbin/{program}", "-c", "echo; read line", *words]
        process = subprocess.Popen(
            command, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_processes_are_the_engines_own_and_nobody_elses(at: Folders, named: Any, tmp_path: Path) -> None:
    dockerd = named("dockerd", "--config-file", str(at.config))
    shim = named("containerd-shim-runc-v2", "-namespace", "moby", "-address", f"unix://{at.run}/containerd.sock")
    named("dockerd", "--config-file", "/etc/docker/daemon.json")
    named("containerd-shim-runc-v2", "-address", str(tmp_path / "run" / "1a2b3c4d5" / "containerd.sock"))
    named("editor", str(at.config))
    assert private.processes(at) == {dockerd: "dockerd", shim: "containerd-shim-runc-v2"}
    assert not private.running(at)
    private.sweep(at)
    assert private.processes(at) == {} and not at.run.exists()


@pytest.mark.parametrize(
    ("text", "store"),
    [
        (None, "classic"), ("{", "classic"), ("[]", "classic"), ('{"features": {}}', "classic"),
        ('{"features": {"containerd-snapshotter": true}}', "containerd"),
    ],
)  # fmt: skip
def test_the_store_of_the_last_start_is_remembered(at: Folders, text: str | None, store: str) -> None:
    if text is not None:
        at.config.write_text(text)
    assert private.store(at) == store


def test_one_engine_a_cache_folder_and_its_socket_path_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "deep/" * 60)
    deep = private.folders()
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    assert deep.host != private.folders().host
    assert len(str(deep.socket).encode()) <= 107 and len(deep.bridge) <= 15


def test_only_root_stops_and_removes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    private.folders().root.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in (daemon.down, daemon.remove):
        with pytest.raises(DockerError, match="only root can"):
            action()


def test_looking_for_an_engine_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    code = "from pipeline.daemon import find; print(find())"
    env = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run([sys.executable, "-c", code], cwd=ROOT, env=env, capture=True, accept=(1,))
    assert "no Docker Engine answers" in done.tail[-1]
    assert list(tmp_path.iterdir()) == []
