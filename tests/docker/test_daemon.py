"""A private engine from start to removal, killed and recovered, in a folder of its own; an engine behind ssh."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.daemon import Engine, at_address, connect, private
from pipeline.daemon.private import Folders, folders
from pipeline.run import run

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]
BASE = "lifecycle/shell:1"


def shell_layer() -> bytes:
    """A tar with this machine's shell, `sleep` and the libraries that they load: a base image without a registry."""
    paths: set[Path] = set()
    for program in ("/bin/sh", "/bin/sleep"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        paths |= {Path(program), *(Path(p) for p in re.findall(r"/\S+", listed))}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(paths):
            tar.add(path.resolve(), arcname=str(path).lstrip("/"))
    return buffer.getvalue()


class Own:
    """The private engine of one cache folder, driven as a user does."""

    def __init__(self, home: Path) -> None:
        self.at: Folders = folders(home / "tuned-image-pipeline")
        # Named in DOCKER_HOST, this engine is the one that is meant, whatever else answers on this machine.
        self.env = {**os.environ, "XDG_CACHE_HOME": str(home), "DOCKER_HOST": self.at.host, "DOCKER_CONTEXT": ""}

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pipeline", "daemon", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env={**self.env, **more}, text=True, **pipes)  # type: ignore[call-overload]

    def run(self, *words: str, code: int = 0, **more: Any) -> tuple[str, str]:
        process = self.start(*words, **more)
        # Ends only when no process has the pipes any more: an engine that inherited them would hang this.
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, err
        assert "Traceback" not in err
        return out, err

    @property
    def engine(self) -> Engine:
        return at_address(self.at.host, "private")

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        with contextlib.closing(connect(self.engine)) as client:
            yield client

    def up(self) -> None:
        """Start it, with an image of a shell."""
        self.run("up")
        with self.client() as client:
            client.api.import_image_from_data(shell_layer(), repository=BASE.split(":", maxsplit=1)[0], tag="1")

    def says(self, image: str, command: str) -> str:
        with self.client() as client:
            return client.containers.run(image, ["/bin/sh", "-c", command], remove=True).decode()  # type: ignore[no-any-return]

    def pids(self, name: str) -> list[int]:
        return [pid for pid, found in private.processes(self.at).items() if found == name]

    def kill(self, name: str) -> None:
        (pid,) = self.pids(name)
        os.kill(pid, signal.SIGKILL)
        wait(lambda: pid not in private.processes(self.at))

    def nothing_is_left(self) -> None:
        assert private.processes(self.at) == {}
        assert list(private._mounts(self.at)) == []
        assert not self.at.run.exists()
        assert not (Path("/sys/class/net") / self.at.bridge).exists()


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def own(engine: Engine, tmp_path: Path) -> Iterator[Own]:
    """A private engine that is not started yet; stopped afterwards, whatever happened."""
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip("only root can start engines of its own")
    one = Own(tmp_path)
    yield one
    one.run("down")
    one.nothing_is_left()


def test_two_at_once_start_one_engine_that_outlives_them_and_keeps_its_images(own: Own, tmp_path: Path) -> None:
    assert json.loads(own.run("status", "--json", code=4)[0])["engine"] is None
    both = [own.start("up"), own.start("up")]
    said = [process.communicate(timeout=600) for process in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert {out for out, _ in said} == {f"DOCKER_HOST={own.at.host}\n"}
    assert sum("private Docker Engine started" in err for _, err in said) == 1
    assert (len(own.pids("dockerd")), len(own.pids("containerd"))) == (1, 1)
    for name in ("dockerd", "containerd"):
        (pid,) = own.pids(name)
        assert os.getsid(pid) != os.getsid(0)
        files = [str(Path(f"/proc/{pid}/fd/{n}").readlink()) for n in (0, 1, 2)]
        assert files == ["/dev/null", *[str(own.at.root / f"{name}.log")] * 2]
    assert json.loads(own.at.config.read_text())["builder"]["gc"]["enabled"] is True
    own.up()
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text(f'FROM {BASE}\nRUN ["/bin/sh", "-c", "echo built > /file"]\n')
    command = ["docker", "buildx", "build", "--quiet", "--network=none", "--tag", "built:1", str(tmp_path / "context")]
    run(command, env=own.engine.environment(), timeout=600)
    found = json.loads(own.run("status", "--json")[0])
    assert (found["engine"]["source"], found["engine"]["cdi"], found["running"]) == ("private", True, True)
    assert (found["store"], found["log"]) == ("classic", str(own.at.log))
    assert "private Docker Engine stopped" in own.run("down")[1]
    own.nothing_is_left()
    assert "no private Docker Engine was running" in own.run("down")[1]
    own.run("up")
    assert own.says("built:1", "read x < /file; echo $x") == "built\n"


@pytest.mark.parametrize("then", ["up", "down"])
def test_what_a_killed_dockerd_leaves_is_gone_after_the_next(own: Own, tmp_path: Path, then: str) -> None:
    own.up()
    with own.client() as client:
        client.containers.run(BASE, ["/bin/sleep", "4711"], detach=True)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text(f'FROM {BASE}\nRUN ["/bin/sleep", "4712"]\n')
    build = subprocess.Popen(
        ["docker", "buildx", "build", "--network=none", str(tmp_path / "context")],
        env={**own.env, "BUILDX_BUILDER": "default"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait(lambda: len(own.pids("sleep")) == 2)
    own.kill("dockerd")
    build.wait(timeout=600)
    assert len(own.pids("sleep")) == 2  # they run on without their engine
    assert json.loads(own.run("status", "--json", code=4)[0])["running"] is False
    own.run(then)
    assert own.pids("sleep") == []
    if then == "down":
        own.nothing_is_left()
    else:
        with own.client() as client:
            assert client.images.get(BASE).tags == [BASE]
            assert [c.status for c in client.containers.list(all=True)] == ["exited"]


@pytest.mark.parametrize("what", ["containerd", "reboot"])
def test_it_starts_again_after_its_containerd_died_or_a_reboot(own: Own, what: str) -> None:
    own.up()
    own.kill("containerd")
    if what == "reboot":
        own.kill("dockerd")
        for where in list(private._mounts(own.at)):
            run(["umount", "--lazy", where])
        shutil.rmtree(own.at.run)
    else:
        assert json.loads(own.run("status", "--json", code=4)[0])["engine"] is None
    own.run("up")
    assert own.says(BASE, "echo alive") == "alive\n"


def test_the_store_is_asked_for_refused_and_remembered(own: Own) -> None:
    own.run("up")
    said = own.run("up", "--store", "containerd", code=4)[1]
    assert "uses the classic image store" in said
    assert (
        "hint: `pipeline daemon down && pipeline daemon up --store containerd`; each store has its own images" in said
    )
    own.run("down")
    own.run("up", "--store", "containerd")
    own.run("down")
    own.up()
    assert own.engine.store == "containerd"
    assert own.says(BASE, "echo here") == "here\n"


def fake_dockerd(folder: Path, text: str) -> str:
    """A PATH that begins with a dockerd that does `text` when it is started."""
    file = folder / "bin" / "dockerd"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exec {shutil.which("dockerd")} "$@"\n{text}\n')
    file.chmod(0o755)
    return f"{file.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_while_it_starts_it_leaves_nothing_or_the_next_start_cleans_up(
    own: Own, tmp_path: Path, sign: signal.Signals
) -> None:
    """With a dockerd that is long in coming: by itself it is there a quarter of a second after its containerd."""
    path = fake_dockerd(tmp_path, f'sleep 5; exec {shutil.which("dockerd")} "$@"')
    process = own.start("up", PATH=path)
    wait((own.at.run / "containerd.sock").is_socket)
    process.send_signal(sign)
    _, said = process.communicate(timeout=600)
    assert "Traceback" not in said
    if sign == signal.SIGKILL:
        own.run("up")
    else:
        assert process.returncode == 130, said
        own.nothing_is_left()


def test_a_dockerd_that_cannot_start_shows_its_own_words(own: Own, tmp_path: Path) -> None:
    _, said = own.run("up", code=4, PATH=fake_dockerd(tmp_path, "echo no space left; exit 1"))
    assert "    no space left" in said
    assert "error: dockerd ended at once" in said
    assert f"log: {own.at.log}" in said
    own.nothing_is_left()


@pytest.fixture
def ssh(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh command that reaches this machine's engine, named in DOCKER_HOST; the file of what it was asked."""
    if not engine.local:
        pytest.skip("the engine under test is not on this machine")
    fake, asked = tmp_path / "ssh", tmp_path / "asked"
    fake.write_text(f'#!/bin/sh\necho "$@" > {asked}\nexec docker --host {engine.host} system dial-stdio\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@gpu-box")
    return asked


def test_an_engine_behind_ssh(ssh: Path, engine: Engine) -> None:
    command = [sys.executable, "-m", "pipeline", "daemon", "status", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["engine"]
    assert (found["host"], found["source"]) == ("ssh://me@gpu-box", "DOCKER_HOST")
    assert (found["version"], found["api_version"]) == (engine.version, engine.api_version)
    words = ssh.read_text().split()
    assert words[:2] == ["-l", "me"]
    assert words[-4:] == ["gpu-box", "docker", "system", "dial-stdio"]


def test_without_ssh_support_in_the_sdk_it_is_one_clear_line(ssh: Path) -> None:
    code = (
        "import sys; sys.modules['paramiko'] = None\n"
        "from pipeline.__main__ import main; sys.exit(main(['daemon', 'status']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "error: no Docker Engine answers at ssh://me@gpu-box" in done.stderr
    assert "hint: pip install paramiko" in done.stderr
    assert "Traceback" not in done.stderr
