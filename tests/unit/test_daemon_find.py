"""Which engine is found, in which order, and what is printed about one that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import pytest

from pipeline import daemon
from pipeline.__main__ import main
from pipeline.contract.errors import DockerError
from pipeline.daemon import Engine, client, engine_from, manage

INFO: dict[str, Any] = {
    "ServerVersion": "26.1.5+dfsg1", "OSType": "linux", "Architecture": "x86_64", "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "extfs"]], "SecurityOptions": ["name=seccomp,profile=builtin"],
    "Runtimes": {"runc": {}, "io.containerd.runc.v2": {}}, "DefaultRuntime": "runc", "CDISpecDirs": [], "Name": "box",
}  # fmt: skip
CONTAINERD = [["driver-type", "io.containerd.snapshotter.v1"]]


def answering(info: Any, components: list[dict[str, str]]) -> type[BaseHTTPRequestHandler]:
    """A tiny engine: answers /_ping, /version and /info, with any API version before."""
    answers = {"version": {"ApiVersion": "1.45", "Components": components}, "info": info}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path.rpartition("/")[2], {})).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class Server(ThreadingMixIn, UnixStreamServer):
    """A tiny engine on a socket."""

    daemon_threads = True

    def __init__(self, path: Path, info: Any, components: list[dict[str, str]]) -> None:
        super().__init__(str(path), answering(info, components))
        self.host = f"unix://{path}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


Serve = Callable[..., Server]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, with a short path: a socket's may have 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="tip"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(name: str = "default.sock", components: Any = (), **over: Any) -> Server:
        servers.append(Server(folder / name, {**INFO, **over}, list(components)))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No engine of this machine is seen: nothing named, no default socket, a cache folder of its own."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(client, "DEFAULT_SOCKET", folder / "default.sock")


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a shell script before every other program of its name."""

    def put(name: str, text: str) -> Path:
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
        return file

    return put


def context(folder: Path, name: str, host: str, *, current: bool = False, tls: bool = False) -> None:
    """A docker context, as `docker context create` writes it."""
    identity = sha256(name.encode()).hexdigest()
    meta = folder / "config" / "contexts" / "meta" / identity / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoint = {"Host": host, "SkipTLSVerify": False}
    meta.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": endpoint}}))
    if tls:
        keys = folder / "config" / "contexts" / "tls" / identity / "docker"
        keys.mkdir(parents=True)
        for file in ("ca.pem", "cert.pem", "key.pem"):
            (keys / file).write_text("")
    if current:
        (folder / "config" / "config.json").write_text(json.dumps({"currentContext": name}))


needs_docker = pytest.mark.skipif(shutil.which("docker") is None, reason="contexts are the docker CLI's")


def test_the_default_socket_is_found_with_its_facts(serve: Serve, folder: Path) -> None:
    assert daemon.find() is None
    server = serve()
    found = daemon.find()
    assert isinstance(found, Engine)
    assert (found.host, found.source, found.local, found.name) == (server.host, "default socket", True, "box")
    assert (found.version, found.api_version, found.os, found.arch) == ("26.1.5+dfsg1", "1.45", "linux", "amd64")
    assert (found.store, found.storage_driver, found.rootless) == ("classic", "overlay2", False)
    assert (found.runtimes, found.cdi, found.cdi_devices) == (("io.containerd.runc.v2", "runc"), False, ())
    server.shutdown()
    server.server_close()  # a socket file that nobody serves counts as none
    assert daemon.find() is None


@needs_docker
def test_docker_host_wins_over_docker_context_over_the_current_context_over_the_default_socket(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source() -> str:
        found = daemon.find()
        assert found is not None
        return found.source

    serve()
    context(folder, "lab", serve("lab.sock").host)
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")  # also where there is no config.json
    assert source() == "context lab"
    monkeypatch.delenv("DOCKER_CONTEXT")
    assert source() == "default socket"
    context(folder, "home", serve("home.sock").host, current=True)
    assert source() == "context home"
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    assert source() == "context lab"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert source() == "default socket"
    monkeypatch.setenv("DOCKER_HOST", serve("named.sock").host)
    assert source() == "DOCKER_HOST"


@needs_docker
def test_a_context_that_does_not_exist_or_answer_is_an_error_although_another_engine_answers(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.setenv("DOCKER_CONTEXT", "lost")
    with pytest.raises(DockerError, match='context "lost": context not found') as caught:
        daemon.find()
    assert "docker context ls" in caught.value.hint
    monkeypatch.delenv("DOCKER_CONTEXT")
    context(folder, "lab", "tcp://127.0.0.1:1", current=True)
    with pytest.raises(DockerError, match=r"tcp://127\.0\.0\.1:1 \(context lab\): connection refused") as caught:
        daemon.find()
    assert "docker context use default" in caught.value.hint


@needs_docker
def test_certificates_come_from_the_context_or_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(client, "at_address", lambda *words: asked.append(words))
    context(folder, "lab", "tcp://box:2376", current=True, tls=True)
    daemon.find()
    monkeypatch.setenv("DOCKER_HOST", "tcp://box:2376")
    daemon.find()
    monkeypatch.setenv("DOCKER_TLS", "1")  # checked, too
    daemon.find()
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/certs")
    daemon.find()
    context_tls, none, usual, named = (words[2] for words in asked)
    assert context_tls.endswith("/docker")
    assert (none, usual, named) == ("", str(folder / "config"), "/certs")


def test_an_engine_behind_tls_is_reached_with_its_own_certificates_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.copy(cert, folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), answering(INFO, [])) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(folder))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/ssl/certs/ca-certificates.crt")
        found = daemon.find()
        assert found is not None and (found.version, found.local) == (INFO["ServerVersion"], False)
        with closing(daemon.connect(found)) as connected:
            assert connected.ping() is not None
        monkeypatch.setenv("DOCKER_CERT_PATH", str(folder / "none"))
        with pytest.raises(DockerError, match="no Docker Engine answers at tcp://127"):
            daemon.find()
        server.shutdown()


def test_the_environment_of_a_cli_names_this_engine_and_no_other() -> None:
    plain = engine_from("tcp://box:2375", "DOCKER_HOST", INFO)
    unset = {"DOCKER_CONTEXT": "", "DOCKER_TLS_VERIFY": "", "DOCKER_TLS": ""}
    assert plain.environment() == {"DOCKER_HOST": "tcp://box:2375", "BUILDX_BUILDER": "default", **unset}
    secure = engine_from("tcp://box:2376", "context lab", INFO, tls="/certs").environment()
    assert (secure["DOCKER_TLS_VERIFY"], secure["DOCKER_CERT_PATH"]) == ("1", "/certs")


def test_a_private_engine_named_in_docker_host_counts_as_absent_while_it_is_down(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()  # another engine answers, but it is not the one that was named
    monkeypatch.setenv("DOCKER_HOST", daemon.client.private.folders().host)
    assert daemon.find() is None


def test_a_socket_without_permission_says_how_to_get_it(serve: Serve, folder: Path) -> None:
    serve()
    (folder / "default.sock").chmod(0o600 if os.geteuid() == 0 else 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(DockerError, match=r"may not open the Docker socket .*default\.sock") as caught:
            daemon.find()
    finally:
        os.seteuid(user)
    assert "add you to the group" in caught.value.hint


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"ServerVersion": "20.10.24+dfsg1"}, "version 20.10.24.*23 or newer"),
        ({"components": [{"Name": "Podman Engine"}]}, "is Podman"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(serve: Serve, over: dict[str, Any], words: str) -> None:
    serve(**over)
    with pytest.raises(DockerError, match=words):
        daemon.find()


@pytest.mark.parametrize(
    "host", ["unix:///gone.sock", "unix:///" + "x" * 200, "npipe:////./pipe/x", "tcp://", "tcp://box:port", "x y"]
)
def test_a_bad_docker_host_ends_with_4_one_line_and_a_hint(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    for action in (["status", "--json"], ["up"]):
        assert main(["daemon", *action]) == 4
        said = capsys.readouterr()
        assert said.out == ""
        assert [line.split(":")[0] for line in said.err.splitlines()] == ["error", "hint"]
        assert "(DOCKER_HOST)" in said.err and "unset DOCKER_HOST" in said.err


@pytest.mark.parametrize("host", ["tcp://u:hunter2@localhost:1", "ssh://u:hunter2@localhost"])
def test_a_login_in_docker_host_is_not_repeated(
    host: str, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program("ssh", "exit 255")
    monkeypatch.setenv("DOCKER_HOST", host)
    for more in ([], ["--verbose"]):
        assert main(["daemon", "status", *more]) == 4
        said = capsys.readouterr().err
        assert "//localhost" in said and "hunter2" not in said


@pytest.mark.parametrize("content", ["[]", '{"auths": 1}', None])
def test_a_config_json_that_is_none_is_one_line(
    content: str | None, serve: Serve, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve()
    file = folder / "config" / "config.json"
    file.parent.mkdir()
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    with pytest.raises(DockerError, match=r"config\.json (is a pipe|does not have)") as caught:
        daemon.at_address(f"unix://{folder}/default.sock", "default socket")
    assert "docker login" in caught.value.hint


def test_a_host_behind_ssh_that_cannot_be_reached_is_reported_in_ssh_s_words_in_bounded_time(
    folder: Path, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("ssh", f'echo "$@" > {folder}/asked; echo Permission denied. >&2; exit 255')
    with pytest.raises(DockerError, match=r"ssh://me@Box:2222 \(DOCKER_HOST\): Permission denied") as caught:
        daemon.at_address("ssh://me@Box:2222", "DOCKER_HOST")
    assert "docker --host ssh://me@Box:2222 version" in caught.value.hint
    asked = (folder / "asked").read_text()
    assert asked == "-o ConnectTimeout=15 -l me -p 2222 -- Box docker system dial-stdio\n"
    program("ssh", "exec sleep 600")
    with pytest.raises(OSError, match="ended after 0 s without finishing"):
        client.check_ssh("ssh://box", timeout=0.3)


def test_status_is_data_and_ends_with_4_without_an_engine(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["daemon", "status", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["engine"], found["running"], found["store"]) == (None, False, "classic")
    assert main(["daemon", "status"]) == 4
    assert "none answers: " in capsys.readouterr().out
    server = serve()
    assert main(["daemon", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["host"] == server.host
    assert main(["daemon", "status"]) == 0
    assert "API 1.45, linux/amd64" in capsys.readouterr().out


def test_facts_that_depend_on_the_engine(tmp_path: Path) -> None:
    def engine(host: str = "tcp://box:2375", **over: Any) -> Engine:
        return engine_from(host, "DOCKER_HOST", {**INFO, **over}, "1.50")

    assert engine(DriverStatus=CONTAINERD, Driver="overlayfs").store == "containerd"
    assert engine(SecurityOptions=["name=seccomp", "name=rootless"]).rootless
    assert (engine(Architecture="aarch64").arch, engine(Architecture="riscv64").arch) == ("arm64", "riscv64")
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}, {"Source": "other", "ID": "x"}]
    assert engine(CDISpecDirs=["/etc/cdi"], DiscoveredDevices=devices).cdi_devices == ("nvidia.com/gpu=all",)
    assert engine(CDISpecDirs=None, DriverStatus=None, Runtimes=None, SecurityOptions=None).cdi is False
    # Engines before API 1.50 say only where the spec files are; those of this machine say nothing about one elsewhere.
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: '0'\n- name: all\n")
    (tmp_path / "net.json").write_text(json.dumps({"kind": "vendor.com/net", "devices": [{"name": "eth"}]}))
    (tmp_path / "broken.yaml").write_text("kind: [")
    folders = [str(tmp_path), "/nowhere"]
    known = ("nvidia.com/gpu=0", "nvidia.com/gpu=all", "vendor.com/net=eth")
    assert engine("unix:///x.sock", CDISpecDirs=folders).cdi_devices == known
    assert engine(CDISpecDirs=folders).cdi_devices == ()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo \"docker: 'buildx' is not a docker command.\" >&2; exit 1", "no buildx plugin"),
        ("echo github.com/docker/buildx v0.9.1 abc", r"buildx is 0\.9\.1; 0\.10\.0 or newer"),
        ("echo hello", "of unknown version"),
    ],
)
def test_a_missing_or_old_buildx_says_how_to_get_it(
    program: Callable[[str, str], Path], answer: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("docker", answer)
    with pytest.raises(DockerError, match=words) as caught:
        manage.buildx_version()
    assert "install docker-buildx" in caught.value.hint
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DockerError, match="is not on PATH"):
        manage.buildx_version()


@pytest.mark.parametrize("text", ["github.com/docker/buildx v0.29.1 a32761a", "github.com/docker/buildx 0.29.1+ds1 x"])
def test_versions_of_buildx(program: Callable[[str, str], Path], text: str) -> None:
    program("docker", f"echo '{text}'")
    assert manage.buildx_version() == (0, 29, 1)


def test_buildx_missing_beside_an_answering_engine_is_installed_by_root_on_debian(
    serve: Serve, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    program("docker", "exit 1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DockerError, match="no buildx plugin"):
        daemon.ensure()
    installed: list[Path] = []

    def install(log: Path) -> None:
        installed.append(log)
        program("docker", "echo github.com/docker/buildx 0.13.1+ds1 abc")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(manage.debian, "supported", lambda: True)
    monkeypatch.setattr(manage.debian, "install_buildx", install)
    assert daemon.ensure().version == "26.1.5+dfsg1"
    assert len(installed) == 1


def test_another_builder_is_not_used_and_a_note_says_so(
    serve: Serve,
    program: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve()
    program("docker", "echo github.com/docker/buildx v0.29.1 abc")
    for name, said in (("farm", True), ("default", False), ("", False)):
        monkeypatch.setenv("BUILDX_BUILDER", name)
        assert daemon.ensure().environment()["BUILDX_BUILDER"] == "default"
        assert ("BUILDX_BUILDER=farm is not used" in capsys.readouterr().err) is said


def test_another_store_is_refused_with_the_command_that_changes_it(
    serve: Serve, program: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(SecurityOptions=["name=rootless"])
    program("docker", "echo github.com/docker/buildx v0.29.1 abc")
    assert daemon.up("classic").store == daemon.ensure("containerd").store == "classic"
    assert "this Docker Engine is rootless" in capsys.readouterr().err
    with pytest.raises(DockerError, match="uses the classic image store") as caught:
        daemon.up("containerd")
    assert (
        '"containerd-snapshotter": true' in caught.value.hint and "each store has its own images" in caught.value.hint
    )


@pytest.mark.parametrize(
    ("user", "mounts", "debian", "why"),
    [
        (1000, True, True, "only root can start one"),
        (0, False, True, "may not mount"),
        (0, True, False, "only be installed on Debian 12"),
    ],
)
def test_nothing_is_installed_where_nothing_could_start(
    user: int, mounts: bool, debian: bool, why: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(manage, "_may_mount", lambda: mounts)
    monkeypatch.setattr(manage.debian, "supported", lambda: debian)
    with pytest.raises(daemon.NoEngine, match=why) as caught:
        daemon.ensure()
    assert "DOCKER_HOST" in caught.value.hint and "sudo" not in caught.value.hint
    assert not (folder / "cache").exists()
