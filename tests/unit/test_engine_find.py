"""Which engine is found, in which order, and what is said of one that does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.contract.exits import Exit
from pipeline.daemon import errors, finding, ssh, wire
from pipeline.daemon.facts import Answers, Engine, Tls, engine_from
from pipeline.daemon.look import Look
from pipeline.daemon.places import places

INFO: dict[str, Any] = {
    "ServerVersion": "26.1.5+dfsg1",
    "OSType": "linux",
    "Architecture": "x86_64",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "extfs"]],
    "SecurityOptions": ["name=seccomp,profile=builtin"],
    "Runtimes": {"runc": {"path": "runc"}, "io.containerd.runc.v2": {"path": "runc"}},
    "DefaultRuntime": "runc",
    "CDISpecDirs": [],
    "NCPU": 2,
    "MemTotal": 25276510208,
    "DockerRootDir": "/var/lib/docker",
    "Name": "box",
}


def http(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    named = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = "".join(f"{k}: {v}\r\n" for k, v in named.items())
    return f"HTTP/1.0 {status}\r\n{lines}\r\n".encode() + body


class Server:
    """A tiny engine: answers each path of one HTTP request a connection with fixed bytes."""

    def __init__(self, path: Path, answers: dict[str, bytes]) -> None:
        self.path, self.answers, self.asked = path, answers, list[str]()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                words = connection.recv(4096).split()
                if words[:1] == [b"STOP"]:
                    return
                if len(words) > 1:
                    name = words[1].decode()
                    self.asked.append(name)
                    with contextlib.suppress(OSError):
                        connection.sendall(self.answers.get(name, http(b"{}", "404 Not Found")))

    def close(self) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))
            last.sendall(b"STOP")
        self._thread.join()
        self._socket.close()


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

    def start(name: str = "engine.sock", **over: Any) -> Server:
        ping = http(b"OK", Api_Version="1.45", Server=over.pop("server", "Docker/26.1.5 (linux)"))
        answers = {"/_ping": ping, "/info": http(json.dumps({**INFO, **over}).encode())}
        servers.append(Server(folder / name, answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No engine of this machine is seen: nothing named, no default socket, a cache folder of its own."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(finding.find, "__defaults__", (None, folder / "default.sock"))


def write_context(folder: Path, name: str, host: str, **endpoint: Any) -> Path:
    identity = sha256(name.encode()).hexdigest()
    meta = folder / "config" / "contexts" / "meta" / identity / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host, **endpoint}}}))
    return folder / "config" / "contexts" / "tls" / identity / "docker"


def use_context(folder: Path, name: str) -> None:
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "config.json").write_text(json.dumps({"currentContext": name}))


def test_no_engine_is_none() -> None:
    assert finding.find() is None


def test_the_default_socket_is_found_with_its_facts(serve: Serve) -> None:
    server = serve("default.sock")
    found = finding.find()
    assert isinstance(found, Engine)
    assert (found.host, found.source) == (server.host, "default socket")
    assert (found.version, found.api_version, found.os, found.arch) == ("26.1.5+dfsg1", "1.45", "linux", "amd64")
    assert (found.store, found.storage_driver, found.rootless) == ("classic", "overlay2", False)
    assert found.runtimes == ("io.containerd.runc.v2", "runc")
    assert (found.cdi, found.cdi_devices, found.local) == (False, (), True)
    assert (found.cpus, found.memory, found.root, found.name) == (2, 25276510208, "/var/lib/docker", "box")
    assert server.asked == ["/_ping", "/info"]


def test_a_socket_file_that_nobody_serves_counts_as_none(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "default.sock"))
    assert finding.find() is None


def test_docker_host_wins_over_context_and_default(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("default.sock")
    write_context(folder, "lab", serve("lab.sock").host)
    named = serve("named.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    monkeypatch.setenv("DOCKER_HOST", named.host)
    found = finding.find()
    assert found is not None
    assert (found.host, found.source) == (named.host, "DOCKER_HOST")


def test_docker_context_wins_over_the_current_one(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_context(folder, "lab", serve("lab.sock").host)
    write_context(folder, "home", serve("home.sock").host)
    use_context(folder, "home")
    by_config = finding.find()
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    by_variable = finding.find()
    assert by_config is not None and by_variable is not None
    assert (by_config.source, by_variable.source) == ("context home", "context lab")


def test_the_context_default_is_the_default_socket(serve: Serve, folder: Path) -> None:
    serve("default.sock")
    use_context(folder, "default")
    found = finding.find()
    assert found is not None
    assert found.source == "default socket"


def test_an_engine_that_is_named_and_silent_is_an_error_although_another_answers(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("default.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/gone.sock")
    with pytest.raises(errors.EngineSilent, match=r"gone\.sock \(DOCKER_HOST\): no such file") as caught:
        finding.find()
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert "unset DOCKER_HOST" in caught.value.hint


def test_our_own_engine_named_in_docker_host_counts_as_absent_when_it_is_down(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("default.sock")  # another engine answers, but it is not the one that was named
    monkeypatch.setenv("DOCKER_HOST", places().host)
    assert finding.find() is None


def test_a_context_that_does_not_answer_names_itself(serve: Serve, folder: Path) -> None:
    serve("default.sock")
    write_context(folder, "lab", "tcp://127.0.0.1:1")
    use_context(folder, "lab")
    with pytest.raises(
        errors.EngineSilent, match=r"tcp://127\.0\.0\.1:1 \(context lab\): connection refused"
    ) as caught:
        finding.find()
    assert "docker context use default" in caught.value.hint


def test_a_host_behind_ssh_that_cannot_be_reached_is_said_in_ssh_s_words_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho Permission denied. >&2\nexit 255\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(errors.EngineSilent, match=r"ssh://me@Box:2222 \(DOCKER_HOST\): Permission denied") as caught:
        finding.at_address("ssh://me@Box:2222", "DOCKER_HOST")
    assert "docker --host ssh://me@Box:2222 version" in caught.value.hint
    said = (tmp_path / "asked").read_text()
    assert said == "-o ConnectTimeout=15 -l me -p 2222 -- Box docker system dial-stdio\n"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(OSError, match="did not finish within 0 s"):
        ssh.reach("ssh://box", patience=0.3)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match="ssh was not found"):
        ssh.reach("ssh://box")


def test_an_unknown_context_says_who_asks_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_context(folder, "nowhere")
    with pytest.raises(errors.ContextUnknown, match=r"no docker context 'nowhere', which .*/config\.json names"):
        finding.find()
    monkeypatch.setenv("DOCKER_CONTEXT", "lost")
    with pytest.raises(errors.ContextUnknown, match="no docker context 'lost', which DOCKER_CONTEXT names"):
        finding.find()


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\udcff"])
def test_a_broken_docker_configuration_is_named(folder: Path, text: str) -> None:
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(errors.ContextUnknown, match=r"config\.json"):
        finding.find()


@pytest.mark.parametrize("meta", ["{", "{}", '{"Endpoints": []}', '{"Endpoints": {"docker": {"Host": 5}}}'])
def test_a_context_without_an_engine_is_named(folder: Path, meta: str) -> None:
    certificates = write_context(folder, "odd", "")
    next(certificates.parents[2].glob("meta/*/meta.json")).write_text(meta)
    use_context(folder, "odd")
    with pytest.raises(errors.ContextUnknown, match="docker context 'odd'"):
        finding.find()


def test_a_socket_without_permission_says_how_to_get_it(serve: Serve, folder: Path) -> None:
    server = serve("default.sock")
    server.path.chmod(0o600)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    else:
        server.path.chmod(0)
    try:
        with pytest.raises(errors.SocketForbidden, match=r"may not open the Docker socket .*default\.sock") as caught:
            finding.find()
    finally:
        os.seteuid(user)
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert "usermod -aG" in caught.value.hint


@pytest.mark.parametrize(
    ("over", "error", "words"),
    [
        ({"ServerVersion": "20.10.24+dfsg1"}, errors.EngineTooOld, "version 20.10.24.*23 or newer"),
        ({"server": "Libpod/5.4.2 (linux)"}, errors.NotDocker, "is Podman"),
    ],
)
def test_what_is_no_usable_engine_is_refused(serve: Serve, over: dict[str, Any], error: Any, words: str) -> None:
    serve("default.sock", **over)
    with pytest.raises(error, match=words):
        finding.find()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "does not speak HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (http(b"", "500 Internal Server Error"), "gave HTTP 500"),
        (http(b"[]"), "no JSON object"),
        (http(b"{"), "no JSON"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", "cut off"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: lots\r\n\r\n{}", "cut off"),
    ],
)
def test_nonsense_on_the_default_socket_is_one_clear_line(serve: Serve, answer: bytes, words: str) -> None:
    serve("default.sock").answers["/info"] = answer
    with pytest.raises(errors.EngineSilent, match=words) as caught:
        finding.find()
    assert "\n" not in caught.value.message


def test_an_engine_that_accepts_and_says_nothing_is_waited_for_a_bounded_time(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(folder / "mute.sock"))
        mute.listen()
        with pytest.raises(TimeoutError):
            wire.ping(wire.unix(folder / "mute.sock"), timeout=0.1)


@pytest.mark.parametrize(
    ("text", "scheme", "where"),
    [
        ("unix:///run/docker.sock", "unix", "/run/docker.sock"),
        ("unix:///with space/docker.sock", "unix", "/with space/docker.sock"),
        ("tcp://box:2376", "tcp", ("box", 2376)),
        ("tcp://box", "tcp", ("box", 2375)),
        ("box:4000", "tcp", ("box", 4000)),
        ("ssh://me@box", "ssh", ("box", 2375)),
        ("tcp://[::1]:99", "tcp", ("::1", 99)),
    ],
)
def test_addresses(text: str, scheme: str, where: object) -> None:
    address = wire.parse_address(text, "DOCKER_HOST")
    assert address.scheme == scheme
    assert where in (address.path, (address.host, address.port))


@pytest.mark.parametrize(
    "text",
    [
        "unix://",
        "unix://relative",
        "unix:///" + "x" * 200,
        "npipe:////./pipe/x",
        "tcp://",
        "tcp://box:port",
        "tcp://box:99999",
    ],
)
def test_what_is_no_address_says_where_it_came_from(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", text)
    with pytest.raises(errors.AddressInvalid, match="DOCKER_HOST is") as caught:
        finding.find()
    assert "unix:///path" in caught.value.hint


def test_the_command_line_ends_with_4_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/gone.sock")
    for action in (["status"], ["status", "--json"], ["up"]):
        assert main(["engine", *action]) == 4
        talk = capsys.readouterr()
        assert talk.out == ""
        assert [line.split(":")[0] for line in talk.err.splitlines()] == ["error", "hint"]


def test_status_without_any_engine_is_data_and_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "status", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] is None
    assert found["private"]["pid"] is None
    assert main(["engine", "status"]) == 4
    assert "none answers" in capsys.readouterr().out


def test_status_prints_what_was_found(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve("default.sock")
    assert main(["engine", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["engine"]
    assert (found["host"], found["version"], found["source"]) == (server.host, "26.1.5+dfsg1", "default socket")
    assert main(["engine", "status"]) == 0
    assert "API 1.45, linux/amd64" in capsys.readouterr().out


def engine(**over: Any) -> Engine:
    return engine_from("tcp://box:2375", "DOCKER_HOST", Answers({**INFO, **over}, "1.50"))


def test_facts_that_depend_on_the_engine() -> None:
    status = [["driver-type", "io.containerd.snapshotter.v1"]]
    assert engine(DriverStatus=status, Driver="overlayfs").store == "containerd"
    assert engine(SecurityOptions=["name=seccomp", "name=rootless"]).rootless
    assert engine().look is Look.ASKED
    for host, said, look in (
        ("unix:///x.sock", [], Look.PUSHED),
        ("tcp://box:2375", [], Look.EXPORTED),
        ("unix:///x.sock", ["name=rootless"], Look.EXPORTED),
    ):
        answers = Answers({**INFO, "DriverStatus": status, "SecurityOptions": said}, "1.50")
        assert engine_from(host, "context lab", answers).look is look
    assert engine(Architecture="aarch64").arch == "arm64"
    assert engine(Architecture="riscv64").arch == "riscv64"
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}, {"Source": "other", "ID": "x"}]
    assert engine(CDISpecDirs=["/etc/cdi"], DiscoveredDevices=devices).cdi_devices == ("nvidia.com/gpu=all",)
    assert engine(CDISpecDirs=None, DriverStatus=None, Runtimes=None, SecurityOptions=None).cdi is False


def test_cdi_devices_of_an_engine_that_does_not_list_them_come_from_its_spec_files(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(
        "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    mounts:\n"
        "    - hostPath: /a\n      name: no\n- containerEdits: {}\n  name: all\n"
    )
    (tmp_path / "other.json").write_text(json.dumps({"kind": "vendor.com/net", "devices": [{"name": "eth"}]}))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.yaml").write_text("kind: [")
    (tmp_path / "readme.txt").write_text("kind: x")
    info = {**INFO, "CDISpecDirs": [str(tmp_path), "/nowhere"]}
    found = engine_from("unix:///x.sock", "private", Answers(info, "1.45"))
    assert found.cdi_devices == ("nvidia.com/gpu=0", "nvidia.com/gpu=all", "vendor.com/net=eth")
    # Files of this machine say nothing about an engine elsewhere.
    assert engine_from("tcp://box:2375", "DOCKER_HOST", Answers(info, "1.45")).cdi_devices == ()


def test_the_environment_of_a_cli_names_this_engine_and_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine().environment()
    assert plain == {"DOCKER_HOST": "tcp://box:2375", "DOCKER_CONTEXT": "", "DOCKER_TLS_VERIFY": "", "DOCKER_TLS": ""}
    secured = engine_from("tcp://box:2376", "context lab", Answers(INFO, "1.45"), Tls("/certs")).environment()
    assert (secured["DOCKER_TLS_VERIFY"], secured["DOCKER_CERT_PATH"]) == ("1", "/certs")
    lax = engine_from("tcp://box:2376", "context lab", Answers(INFO, "1.45"), Tls("/certs", verify=False)).environment()
    assert (lax["DOCKER_TLS_VERIFY"], lax["DOCKER_TLS"]) == ("", "1")


def test_certificates_come_from_the_context_or_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.daemon import contexts

    write_context(folder, "lab", "tcp://box:2376", SkipTLSVerify=True).mkdir(parents=True)
    named = contexts.named({"DOCKER_CONFIG": str(folder / "config"), "DOCKER_CONTEXT": "lab"})
    assert named is not None and named.tls is not None
    assert (named.tls.verify, named.tls.folder.endswith("/docker")) == (False, True)
    by_env = contexts.named({"DOCKER_HOST": "tcp://box:2376", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/c"})
    assert by_env is not None and by_env.tls == Tls("/c")
    home = contexts.named({"DOCKER_HOST": "tcp://box:2376", "DOCKER_TLS": "1", "HOME": "/home/me"})
    assert home is not None and home.tls == Tls("/home/me/.docker", verify=False)


def test_a_rootless_engine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from pipeline.daemon import flow

    found = engine(SecurityOptions=["name=rootless"])
    monkeypatch.setattr(flow, "find", lambda: found)
    monkeypatch.setattr(flow, "_buildx", lambda _engine: (0, 29, 0))
    assert flow.ensure() is found
    assert "rootless" in capsys.readouterr().err
