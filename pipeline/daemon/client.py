"""Find the Docker Engine that the docker CLI would use, and connect to it with the docker SDK.

The order is the CLI's: DOCKER_HOST, DOCKER_CONTEXT, the current context, the default socket. After that comes the
private engine (`private`). An engine that is named must answer: nothing else is used in its place.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.contract.errors import DockerError, PipelineError
from pipeline.home import home
from pipeline.run import run

from . import private

if TYPE_CHECKING:
    from docker import DockerClient

DEFAULT_SOCKET = Path("/var/run/docker.sock")
OLDEST = 23  # the first major version whose built-in Dockerfile frontend takes named contexts
_FIND_TIMEOUT = 15  # s, per request
_TIMEOUT = 60  # s, per request; streams and waits set their own
_SSH_CONNECT = 15  # s, for connection, banner and key exchange
_SSH_TIMEOUT = 45.0  # s, for all of it: logging in may be slow
_ANY_API = "1.44"  # only until the engine has named its own: the SDK asks before certificates can be set up
_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # /info has uname's names, images have Go's


class NoEngine(DockerError):
    """No Docker Engine answers and none can be started here."""


@dataclass(frozen=True)
class Engine:
    """An engine that answered, as its /info describes it (Engine API 1.42 to 1.51).

    `host` is its address as DOCKER_HOST takes it; `source` says who named it: `DOCKER_HOST`, `context NAME`, `default
    socket` or `private`. `cdi_devices` are the CDI devices that are known, such as `nvidia.com/gpu=all`; `name` is the
    host name of the engine's machine; `tls` a folder with `ca.pem`, `cert.pem` and `key.pem`, or empty.
    """

    host: str
    source: str
    version: str
    api_version: str
    os: str
    arch: str  # as Go names it: amd64, arm64
    storage_driver: str
    containerd_store: bool  # else the classic image store
    rootless: bool
    runtimes: tuple[str, ...]
    default_runtime: str
    cdi: bool  # whether CDI devices can be requested
    cdi_devices: tuple[str, ...]
    name: str
    tls: str = ""

    @property
    def store(self) -> str:
        """`containerd` or `classic`."""
        return "containerd" if self.containerd_store else "classic"

    @property
    def local(self) -> bool:
        """Whether the engine's socket is on this machine."""
        return self.host.startswith("unix://")

    def environment(self) -> dict[str, str]:
        """What makes the docker CLI use this engine, and buildx its own BuildKit (empty counts as unset).

        The builder `default` is the one of the engine that DOCKER_HOST names.
        """
        env = {"DOCKER_HOST": self.host, "BUILDX_BUILDER": "default"}
        env |= dict.fromkeys(("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_TLS"), "")
        return {**env, "DOCKER_CERT_PATH": self.tls, "DOCKER_TLS_VERIFY": "1"} if self.tls else env


def config_folder(env: Mapping[str, str] | None = None) -> Path:
    """The docker CLI's folder: `$DOCKER_CONFIG` or `~/.docker`."""
    env = os.environ if env is None else env
    return Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME") or home()) / ".docker")


def connect(engine: Engine, *, timeout: int = _TIMEOUT) -> DockerClient:
    """A client for an engine that was found; `timeout` in seconds per request. The caller closes it."""
    return _client(engine.host, engine.tls, engine.api_version or _ANY_API, timeout)


def find() -> Engine | None:
    """The engine that answers, None where there is none and none was named; raise `DockerError` for a bad one."""
    named, own = _named(), private.folders()
    if named is not None and named[0] != own.host:
        return at_address(*named)
    if named is None and _served(DEFAULT_SOCKET):
        return at_address(f"unix://{DEFAULT_SOCKET}", "default socket")
    if not private.running(own):
        return None
    with contextlib.suppress(DockerError):  # another process starts it just now: who needs it waits for the lock
        return at_address(own.host, "private")
    return None


def at_address(host: str, source: str, tls: str = "") -> Engine:
    """The engine at an address; raise `DockerError` when none answers or it cannot be used."""
    if not host.startswith("ssh://"):
        # The SDK imports paramiko wherever it is installed, which takes longer than all else that a repeated build
        # imports. A process talks to one engine: without ssh it does without.
        sys.modules.setdefault("paramiko", None)  # type: ignore[arg-type]
    try:
        _reach(host)
        with contextlib.closing(_client(host, tls, _ANY_API, _FIND_TIMEOUT)) as client:
            version = client.version(api_version=False)
        api_version = str(version.get("ApiVersion", ""))
        with contextlib.closing(_client(host, tls, api_version or _ANY_API, _FIND_TIMEOUT)) as client:
            info = client.info()
        if "ServerVersion" not in info:
            raise OSError("what answers there is no Docker Engine")
    except _failures() as error:
        raise _silent(host, source, error) from error
    if any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ()):
        raise DockerError(
            f"{host} ({source}) is Podman, not a Docker Engine",
            hint="name a Docker Engine in DOCKER_HOST: builds need BuildKit's named contexts",
        )
    engine = engine_from(host, source, info, api_version, tls)
    number = re.match(r"\d+", engine.version)
    if number is not None and int(number[0]) < OLDEST:
        raise DockerError(
            f"the Docker Engine at {host} is version {engine.version}; {OLDEST} or newer is needed",
            hint="upgrade it, or name another Docker Engine in DOCKER_HOST",
        )
    return engine


def engine_from(host: str, source: str, info: Mapping[str, Any], api_version: str = "", tls: str = "") -> Engine:
    """Read the body of /info; fields that an old engine does not send are empty."""
    rows = info.get("DriverStatus") or ()
    folders = tuple(str(folder) for folder in info.get("CDISpecDirs") or ())
    found = [row for row in info.get("DiscoveredDevices") or () if row.get("Source") == "cdi"]
    devices = {str(row["ID"]) for row in found}
    if not devices and host.startswith("unix://"):  # engines before API 1.50 say only where the spec files are
        devices = set(_cdi_devices(folders))
    machine = str(info.get("Architecture", ""))
    return Engine(
        host=host,
        source=source,
        version=str(info.get("ServerVersion", "")),
        api_version=api_version,
        os=str(info.get("OSType", "")),
        arch=_GO_NAMES.get(machine, machine),
        storage_driver=str(info.get("Driver", "")),
        # With the containerd store, Driver names a snapshotter and DriverStatus its kind.
        containerd_store=any(row[0] == "driver-type" and "containerd.snapshotter" in str(row[-1]) for row in rows),
        rootless=any("name=rootless" in str(option) for option in info.get("SecurityOptions") or ()),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        default_runtime=str(info.get("DefaultRuntime", "")),
        cdi=bool(folders),
        cdi_devices=tuple(sorted(devices)),
        name=str(info.get("Name", "")),
        tls=tls,
    )


def _cdi_devices(folders: Sequence[str]) -> Iterator[str]:
    """The devices in CDI spec files (JSON or YAML; `kind` and named `devices`); other files are skipped."""
    import yaml  # reads JSON as well

    for file in (f for folder in folders for f in sorted(Path(folder).glob("*"))):
        if file.suffix in {".json", ".yaml", ".yml"}:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
                spec = yaml.safe_load(file.read_text(encoding="utf-8"))
                yield from [f"{spec['kind']}={device['name']}" for device in spec["devices"]]


def _client(host: str, tls: str, version: str, timeout: int) -> DockerClient:
    """The SDK's client for an API version; nothing is asked yet."""
    from docker.tls import TLSConfig

    from docker import DockerClient

    config: Any = False
    if tls:
        pair = (f"{tls}/cert.pem", f"{tls}/key.pem")
        own = pair if all(Path(file).is_file() for file in pair) else None
        config = TLSConfig(client_cert=own, ca_cert=f"{tls}/ca.pem", verify=True)
    docker_config = config_folder() / "config.json"
    if docker_config.is_fifo():  # the SDK would wait for ever
        raise DockerError(f"{docker_config} is a pipe, not a file", hint="repair it, or `docker login` again")
    # The ssh program, not paramiko's own client: it knows the user's keys, agent and jump hosts.
    try:
        client = DockerClient(base_url=host, version=version, tls=config, timeout=timeout, use_ssh_client=True)
    except (AttributeError, TypeError, RecursionError) as error:  # the SDK takes the file's shape for granted
        raise DockerError(
            f"{docker_config} does not have the shape of Docker's", hint="repair it, or `docker login` again"
        ) from error
    if tls:
        # Else REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE would win over the engine's own certificates.
        client.api.trust_env = False
    return client


def _failures() -> tuple[type[Exception], ...]:
    """What the SDK raises when an address is wrong or nothing useful answers there."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return (DockerException, RequestException, OSError, ValueError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it: the SDK wraps the reason several times."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: BaseException) -> str:
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def _silent(host: str, source: str, error: Exception) -> DockerError:
    if any(isinstance(cause, PermissionError) for cause in _causes(error)):
        return _forbidden(host.removeprefix("unix://"), source)
    other = "unset DOCKER_HOST" if source == "DOCKER_HOST" else "`docker context use default`"
    fix = f"start that Docker Engine, or {other}"
    if source in {"default socket", "private"}:
        fix = "its log says why"
    elif "paramiko" in str(error):
        fix = "pip install paramiko, or forward the engine's socket with `ssh -L` and name that in DOCKER_HOST"
    elif host.startswith("ssh://"):
        fix = f"`docker --host {host} version` must work without asking for anything; or {other}"
    return DockerError(f"no Docker Engine answers at {host} ({source}): {_reason(error)}", hint=fix)


def _forbidden(path: str, source: str) -> DockerError:
    group = "docker"
    with contextlib.suppress(OSError, KeyError):
        group = grp.getgrgid(Path(path).stat().st_gid).gr_name
    return DockerError(
        f"this user may not open the Docker socket {path} ({source})",
        hint=f"have an administrator add you to the group {group} and log in again, or set DOCKER_HOST",
    )


def _reach(host: str) -> None:
    """Raise OSError, in bounded time and with the reason, when nobody listens at a `unix` or `ssh` address."""
    if host.startswith("ssh://"):
        check_ssh(host)
    elif host.startswith("unix:///"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(host.removeprefix("unix://"))


def check_ssh(host: str, *, timeout: float = _SSH_TIMEOUT) -> None:
    """Connect to `ssh://[user@]host[:port]` once and hang up; raise OSError with what ssh, or docker there, says.

    The docker SDK runs the same command without a timeout and reports a failure as a broken pipe.
    """
    where = urlsplit(host)
    command = ["ssh", "-o", f"ConnectTimeout={_SSH_CONNECT}"]
    command += ["-l", where.username] if where.username else []
    command += ["-p", str(where.port)] if where.port else []
    # netloc keeps upper case, which `hostname` does not: names in ssh's configuration are case-sensitive.
    name = where.netloc.rpartition("@")[2].partition(":")[0]
    try:
        run([*command, "--", name, "docker system dial-stdio"], timeout=timeout)
    except PipelineError as error:
        said = [line.strip() for line in error.details if line.strip()]
        raise OSError(said[-1][:300] if said else error.message) from error


def _served(path: Path) -> bool:
    """Whether a process listens at the socket `path`."""
    try:
        _reach(f"unix://{path}")
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return False
    except OSError as error:
        raise _silent(f"unix://{path}", "default socket", error) from error
    return True


def _named() -> tuple[str, str, str] | None:
    """Address, source and certificates of the engine that the user names; None for the default socket."""
    host = os.environ.get("DOCKER_HOST")
    config = config_folder()
    if host:
        secure = os.environ.get("DOCKER_TLS_VERIFY") or os.environ.get("DOCKER_TLS")
        return host, "DOCKER_HOST", os.environ.get("DOCKER_CERT_PATH") or str(config) if secure else ""
    if not os.environ.get("DOCKER_CONTEXT") and not (config / "config.json").is_file():
        return None
    return _context()


def _context() -> tuple[str, str, str] | None:
    """The docker CLI's current context, None for `default`.

    The CLI is asked: the SDK takes the default socket in place of a context that does not exist, and finds none where
    there is no config.json (docker SDK 7.2.0).
    """
    try:
        (found,) = json.loads(run(["docker", "context", "inspect"], capture=True, timeout=60).stdout)
        name, endpoint = str(found["Name"]), found["Endpoints"]["docker"]
        host, certificates = str(endpoint["Host"]), Path(found["Storage"]["TLSPath"]) / "docker"
    except (PipelineError, ValueError, KeyError, TypeError) as error:
        said = [*error.details, error.message] if isinstance(error, PipelineError) else [str(error)]
        raise DockerError(
            f"the current docker context cannot be used: {said[0]}",
            hint="`docker context ls` lists them; DOCKER_CONTEXT, DOCKER_HOST and `docker context use` choose one",
        ) from error
    if name == "default":
        return None
    return host, f"context {name}", str(certificates) if certificates.is_dir() else ""
