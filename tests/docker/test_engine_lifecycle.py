"""A private engine from start to end, killed and recovered, in a folder of its own; engines behind ssh and TLS."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.daemon import Engine, connect, finding, leftovers, procs
from pipeline.daemon.places import Places, places

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
        self.home = home
        self.at: Places = places(home / "tuned-image-pipeline")
        # Named in DOCKER_HOST, our own engine is the one that is meant, whatever else answers on this machine.
        self.env = {**os.environ, "XDG_CACHE_HOME": str(home), "DOCKER_HOST": self.at.host, "DOCKER_CONTEXT": ""}

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pipeline", "engine", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env={**self.env, **more}, text=True, **pipes)  # type: ignore[call-overload]

    def run(self, *words: str, code: int = 0, **more: Any) -> tuple[str, str]:
        process = self.start(*words, **more)
        # Ends only when nobody holds the pipes any more: an engine that inherited them would hang this.
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, err
        assert "Traceback" not in err
        return out, err

    @property
    def engine(self) -> Engine:
        return finding.at_address(self.at.host, "private")

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        with contextlib.closing(connect(self.engine)) as client:
            yield client

    def daemons(self) -> list[int]:
        """Every dockerd and containerd of this engine."""
        found = ((pid, procs.command_line(pid)) for pid in procs.all_pids())
        return [
            pid for pid, words in found
            if words and Path(words[0]).name in {"dockerd", "containerd"} and any(str(self.at.root) in w for w in words)
        ]  # fmt: skip

    def kill(self, pid_file: Path) -> None:
        pid = procs.read_pid(pid_file)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait(lambda: not procs.alive(pid))

    def nothing_is_left(self) -> None:
        folders = (self.at.root, self.at.run)
        assert leftovers.processes(folders) == ()
        assert leftovers.mounts(folders) == ()
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


def load_base(own: Own) -> None:
    with own.client() as client:
        client.api.import_image_from_data(shell_layer(), repository=BASE.split(":", maxsplit=1)[0], tag="1")


def test_two_at_once_start_one_engine_that_outlives_them(own: Own) -> None:
    both = [own.start("up"), own.start("up")]
    told = [process.communicate(timeout=600) for process in both]
    assert [p.returncode for p in both] == [0, 0]
    assert {out for out, _ in told} == {f"DOCKER_HOST={own.at.host}\n"}
    assert sum("private engine started" in err for _, err in told) == 1
    dockerd, containerd = procs.running_pid(own.at), procs.containerd_pid(own.at)
    assert dockerd is not None and containerd is not None
    assert sorted(own.daemons()) == sorted([dockerd, containerd])
    for pid, log in ((dockerd, own.at.log), (containerd, own.at.containerd_log)):
        assert os.getsid(pid) != os.getsid(0)
        files = [str(Path(f"/proc/{pid}/fd/{n}").readlink()) for n in (0, 1, 2)]
        assert files == ["/dev/null", str(log), str(log)]
    again, said = own.run("up")
    assert again == f"DOCKER_HOST={own.at.host}\n"
    assert "started" not in said
    assert procs.running_pid(own.at) == dockerd


def test_status_tells_what_runs_and_down_leaves_nothing(own: Own) -> None:
    assert json.loads(own.run("status", "--json", code=4)[0])["engine"] is None
    own.run("up")
    load_base(own)
    found = json.loads(own.run("status", "--json", "--size")[0])
    assert found["engine"]["host"] == own.at.host
    assert found["engine"]["source"] == "private"
    assert found["engine"]["storage_driver"] == "overlay2"
    assert found["engine"]["root"] == str(own.at.data)
    assert found["engine"]["cdi"] is True
    private = found["private"]
    assert private["pid"] == procs.running_pid(own.at)
    assert (private["store"], private["log"], private["complete"]) == ("classic", str(own.at.log), True)
    assert private["bytes"] > 1_000_000
    assert "private engine stopped" in own.run("down")[1]
    own.nothing_is_left()
    assert own.at.data.is_dir()  # images stay for the next start
    assert "no private engine was running" in own.run("down")[1]


def test_builds_and_containers_work_and_images_outlive_a_restart(own: Own, tmp_path: Path) -> None:
    from pipeline.daemon import buildx
    from pipeline.run import run

    own.run("up")
    load_base(own)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text(f'FROM {BASE}\nRUN ["/bin/sh", "-c", "echo built > /file"]\n')
    command = ["docker", "buildx", "build", "--quiet", "--tag", "lifecycle/built:1", str(tmp_path / "context")]
    run(command, env=buildx.environment(own.engine), timeout=600)
    own.run("down")
    own.run("up")
    with own.client() as client:
        said = client.containers.run("lifecycle/built:1", ["/bin/sh", "-c", "read x < /file; echo $x"], remove=True)
    assert said == b"built\n"


def test_a_killed_dockerd_is_recovered_and_what_it_left_is_gone(own: Own, tmp_path: Path) -> None:
    own.run("up")
    load_base(own)
    with own.client() as client:
        client.containers.run(BASE, ["/bin/sleep", "4711"], detach=True)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text(f'FROM {BASE}\nRUN ["/bin/sleep", "4712"]\n')
    build = subprocess.Popen(
        ["docker", "buildx", "build", str(tmp_path / "context")],
        env={**own.env, "BUILDX_BUILDER": "default"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def sleepers() -> set[str]:
        lines = (procs.command_line(pid) for pid in procs.all_pids())
        return {words[1] for words in lines if words[:1] == ("/bin/sleep",) and words[1] in {"4711", "4712"}}

    wait(lambda: sleepers() == {"4711", "4712"})
    own.kill(own.at.pid_file)
    build.wait(timeout=600)
    assert sleepers() == {"4711", "4712"}  # they run on without their engine
    assert own.at.socket.is_socket()
    assert json.loads(own.run("status", "--json", code=4)[0])["private"]["pid"] is None
    own.run("up")
    assert sleepers() == set()
    assert len(own.daemons()) == 2
    with own.client() as client:
        assert client.images.get(BASE).tags == [BASE]
        assert [c.status for c in client.containers.list(all=True)] == ["exited"]


def test_down_after_a_kill_leaves_nothing_either(own: Own) -> None:
    own.run("up")
    load_base(own)
    with own.client() as client:
        client.containers.run(BASE, ["/bin/sleep", "4713"], detach=True)
    own.kill(own.at.pid_file)
    assert "private engine stopped" in own.run("down")[1]
    own.nothing_is_left()


def test_a_killed_containerd_is_started_again_under_the_running_dockerd(own: Own) -> None:
    own.run("up")
    load_base(own)
    dockerd = procs.running_pid(own.at)
    own.kill(own.at.containerd_pid_file)
    assert json.loads(own.run("status", "--json", code=4)[0])["private"]["pid"] == dockerd
    assert "containerd has died" in own.run("up")[1]
    assert procs.running_pid(own.at) == dockerd
    with own.client() as client:
        assert client.containers.run(BASE, ["/bin/sh", "-c", "echo alive"], remove=True) == b"alive\n"


@pytest.mark.parametrize("run_folder", ["kept", "emptied"])
def test_it_starts_after_a_reboot(own: Own, run_folder: str) -> None:
    own.run("up")
    load_base(own)
    own.kill(own.at.pid_file)
    own.kill(own.at.containerd_pid_file)
    leftovers.unmount((own.at.root, own.at.run))
    if run_folder == "kept":  # /run on disk: pid files whose numbers others have by now, sockets that nobody serves
        for file in (own.at.pid_file, own.at.containerd_pid_file, own.at.run / "exec.pid"):
            file.write_text(f"{os.getpid()}\n")
    else:
        shutil.rmtree(own.at.run)
    own.run("up")
    with own.client() as client:
        assert client.images.get(BASE).tags == [BASE]


def test_the_store_is_asked_for_refused_and_remembered(own: Own) -> None:
    own.run("up")
    _, said = own.run("up", "--store", "containerd", code=4)
    assert "error: the engine at" in said
    assert "runs with the classic store" in said
    assert "hint: pipeline engine down && pipeline engine up --store containerd" in said
    own.run("down")
    own.run("up", "--store", "containerd")
    assert own.engine.store == "containerd"
    own.run("down")
    own.run("up")
    assert own.engine.store == "containerd"
    load_base(own)
    with own.client() as client:
        assert client.containers.run(BASE, ["/bin/sh", "-c", "echo here"], remove=True) == b"here\n"


def test_ctrl_c_while_it_starts_leaves_nothing(own: Own, tmp_path: Path) -> None:
    """With a dockerd that is long in coming: by itself it is there a quarter of a second after its containerd."""
    slow = tmp_path / "bin" / "dockerd"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 5\nexec {shutil.which("dockerd")} "$@"\n')
    slow.chmod(0o755)
    process = own.start("up", PATH=f"{slow.parent}:{os.environ['PATH']}")
    wait(own.at.containerd_socket.is_socket)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    own.nothing_is_left()


def test_a_dockerd_that_cannot_start_shows_its_own_words(own: Own, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "dockerd"
    fake.parent.mkdir()
    real = "Docker version 26.1.5, build 1"
    fake.write_text(f'#!/bin/sh\n[ "$1" != --version ] || {{ echo {real}; exit; }}\necho no space left; exit 1\n')
    fake.chmod(0o755)
    _, said = own.run("up", code=4, PATH=f"{fake.parent}:{os.environ['PATH']}")
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


# The docker SDK leaves its ssh processes and their pipes to the garbage collector, which is made to come here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_behind_ssh(ssh: Path, engine: Engine) -> None:
    found = finding.find()
    assert found is not None
    assert (found.host, found.source, found.local) == ("ssh://me@gpu-box", "DOCKER_HOST", False)
    assert (found.version, found.api_version) == (engine.version, engine.api_version)
    words = ssh.read_text().split()
    assert words[:2] == ["-l", "me"]
    assert words[-4:] == ["gpu-box", "docker", "system", "dial-stdio"]
    with contextlib.closing(connect(found)) as client:
        assert client.ping()
    del client
    gc.collect()


def test_without_ssh_support_in_the_sdk_it_is_one_clear_line(ssh: Path) -> None:
    code = (
        "import sys; sys.modules['paramiko'] = None\n"
        "from pipeline.__main__ import main; sys.exit(main(['engine', 'status']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "error: ssh://me@gpu-box needs the docker SDK's ssh support" in done.stderr
    assert "hint: pip install paramiko" in done.stderr
    assert "Traceback" not in done.stderr


def forward(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def pass_on(raw: socket.socket, context: ssl.SSLContext, path: str) -> None:
    """Take TLS off one connection and hand it on to the socket at `path`."""
    with (
        raw,
        contextlib.suppress(OSError),
        context.wrap_socket(raw, server_side=True) as outside,
        socket.socket(socket.AF_UNIX) as inside,
    ):
        inside.connect(path)
        back = threading.Thread(target=forward, args=(inside, outside))
        back.start()
        forward(outside, inside)
        back.join()


def serve_tls(listener: socket.socket, context: ssl.SSLContext, path: str) -> None:
    """Pass every connection on, until the listener closes."""
    connections = []
    with contextlib.suppress(OSError):
        while True:
            raw, _ = listener.accept()
            connections.append(threading.Thread(target=pass_on, args=(raw, context, path)))
            connections[-1].start()
    for connection in connections:
        connection.join()


@pytest.fixture
def tls(engine: Engine, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The engine behind TLS on a port of this machine; the address and a folder with certificates."""
    if not engine.local:
        pytest.skip("the engine under test is not on this machine")
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    key, cert = certificates / "key.pem", certificates / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.copy(cert, certificates / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_tls, args=(listener, context, engine.host.removeprefix("unix://")))
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", certificates
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=60)


def test_an_engine_behind_tls(tls: tuple[str, Path], engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run import run

    host, certificates = tls
    for name, value in (("DOCKER_HOST", host), ("DOCKER_TLS_VERIFY", "1"), ("DOCKER_CERT_PATH", str(certificates))):
        monkeypatch.setenv(name, value)
    found = finding.find()
    assert found is not None
    assert (found.host, found.version) == (host, engine.version)
    with contextlib.closing(connect(found)) as client:
        assert client.ping()
    # The CLI, with nothing but what `environment` says, reaches the same engine.
    for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name)
    asked = run(["docker", "version", "--format", "{{.Server.Version}}"], env=found.environment(), capture=True)
    assert asked.stdout.strip() == engine.version
