"""What is known of an engine that answers, as its /info tells it (Engine API, 1.42 to 1.51)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .look import Look

_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # /info has uname's names, images have Go's
OLDEST = 23  # the first major version whose built-in Dockerfile frontend takes named contexts


@dataclass(frozen=True)
class Tls:
    """A folder with `ca.pem`, `cert.pem` and `key.pem`, and whether the engine's name is checked."""

    folder: str
    verify: bool = True


@dataclass(frozen=True)
class Answers:
    """What an engine said of itself: the body of /info, its API version, whether it is Podman in disguise."""

    info: Mapping[str, Any]
    api_version: str
    podman: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine that answered.

    `host` is its address as DOCKER_HOST takes it; `source` says who named it: `DOCKER_HOST`, `context NAME`,
    `default socket` or `private`. `containerd_store` tells the image store (else the classic one), `cdi`
    whether CDI devices can be asked for, `cdi_devices` those known (`nvidia.com/gpu=all`); memory in bytes.
    """

    host: str
    source: str
    version: str
    api_version: str
    os: str
    arch: str  # as Go names it: amd64, arm64
    storage_driver: str
    containerd_store: bool
    rootless: bool
    runtimes: tuple[str, ...]
    default_runtime: str
    cdi: bool
    cdi_devices: tuple[str, ...]
    cpus: int
    memory: int
    root: str
    name: str
    tls: Tls | None = None

    @property
    def store(self) -> str:
        """`containerd` or `classic`."""
        return "containerd" if self.containerd_store else "classic"

    @property
    def local(self) -> bool:
        """Whether the engine's socket is on this machine."""
        return self.host.startswith("unix://")

    @property
    def look(self) -> Look:
        """How images are looked at: the containerd store pushes to a server of ours on 127.0.0.1, blob by blob, where
        that is its own loopback too (not so rootless).
        """
        if not self.containerd_store:
            return Look.ASKED
        return Look.PUSHED if self.local and not self.rootless else Look.EXPORTED

    def environment(self) -> dict[str, str]:
        """What a docker CLI needs in its environment to talk to this engine and no other (empty counts as unset)."""
        env = {"DOCKER_HOST": self.host, "DOCKER_CONTEXT": "", "DOCKER_TLS_VERIFY": "", "DOCKER_TLS": ""}
        if self.tls is not None:
            env["DOCKER_CERT_PATH"] = self.tls.folder
            env["DOCKER_TLS_VERIFY" if self.tls.verify else "DOCKER_TLS"] = "1"
        return env


def _containerd_store(info: Mapping[str, Any]) -> bool:
    # With the containerd store, Driver names a snapshotter and DriverStatus its kind.
    rows = info.get("DriverStatus") or ()
    return any(len(r) == 2 and r[0] == "driver-type" and "containerd.snapshotter" in str(r[1]) for r in rows)


def _devices(info: Mapping[str, Any]) -> tuple[str, ...]:
    # DiscoveredDevices is there since API 1.50; older engines tell only where the specs lie.
    rows = info.get("DiscoveredDevices") or ()
    return tuple(sorted(str(r["ID"]) for r in rows if isinstance(r, dict) and r.get("Source") == "cdi" and r.get("ID")))


def engine_from(host: str, source: str, answers: Answers, tls: Tls | None = None) -> Engine:
    """Put an engine's answers together; fields that an old engine does not send are empty."""
    info = answers.info
    spec_folders = tuple(str(d) for d in info.get("CDISpecDirs") or ())
    devices = _devices(info)
    if not devices and spec_folders and host.startswith("unix://"):
        from .cdi import devices_in

        devices = devices_in(spec_folders)
    machine = str(info.get("Architecture", ""))
    return Engine(
        host=host,
        source=source,
        version=str(info.get("ServerVersion", "")),
        api_version=answers.api_version,
        os=str(info.get("OSType", "")),
        arch=_GO_NAMES.get(machine, machine),
        storage_driver=str(info.get("Driver", "")),
        containerd_store=_containerd_store(info),
        rootless=any("name=rootless" in str(o) for o in info.get("SecurityOptions") or ()),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        default_runtime=str(info.get("DefaultRuntime", "")),
        cdi=bool(spec_folders),
        cdi_devices=devices,
        cpus=int(info.get("NCPU") or 0),
        memory=int(info.get("MemTotal") or 0),
        root=str(info.get("DockerRootDir", "")),
        name=str(info.get("Name", "")),
        tls=tls,
    )
