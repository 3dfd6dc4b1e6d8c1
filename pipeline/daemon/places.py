"""Where the private engine keeps its things.

    <cache home>/tuned-image-pipeline/daemon/       shared by all checkouts of one user
        lock                held while one process installs, starts or stops
        daemon.json         dockerd's configuration; the image store is remembered here
        containerd.toml     containerd's
        data/               dockerd's data root
        containerd/         containerd's root
        dockerd.log containerd.log apt.log

    /run/tuned-image-pipeline/<id>/                 gone after a reboot; <id> from the path above
        docker.sock dockerd.pid containerd.sock containerd.pid
        exec/ containerd/   state of running containers

The second folder exists because a socket's path may have 107 bytes only, and a cache folder may lie deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_bytes
from pipeline.home import cache_home

RUN = Path("/run/tuned-image-pipeline")


@dataclass(frozen=True)
class Places:
    """The two folders of one private engine, and what lies in them."""

    root: Path
    run: Path

    @property
    def lock(self) -> Path:
        """Held while one process installs, starts or stops."""
        return self.root / "lock"

    @property
    def config(self) -> Path:
        """dockerd's configuration."""
        return self.root / "daemon.json"

    @property
    def containerd_config(self) -> Path:
        """containerd's configuration."""
        return self.root / "containerd.toml"

    @property
    def data(self) -> Path:
        """dockerd's data root."""
        return self.root / "data"

    @property
    def containerd_root(self) -> Path:
        """containerd's root: images and snapshots of the containerd store."""
        return self.root / "containerd"

    @property
    def log(self) -> Path:
        """dockerd's log."""
        return self.root / "dockerd.log"

    @property
    def containerd_log(self) -> Path:
        """containerd's log."""
        return self.root / "containerd.log"

    @property
    def apt_log(self) -> Path:
        """What apt said."""
        return self.root / "apt.log"

    @property
    def socket(self) -> Path:
        """The engine's socket."""
        return self.run / "docker.sock"

    @property
    def host(self) -> str:
        """The engine's address, as DOCKER_HOST takes it."""
        return f"unix://{self.socket}"

    @property
    def pid_file(self) -> Path:
        """dockerd's process id."""
        return self.run / "dockerd.pid"

    @property
    def containerd_socket(self) -> Path:
        """containerd's socket."""
        return self.run / "containerd.sock"

    @property
    def containerd_pid_file(self) -> Path:
        """containerd's process id."""
        return self.run / "containerd.pid"

    @property
    def bridge(self) -> str:
        """The name of this engine's own bridge: docker0 may belong to another engine. At most 15 bytes."""
        return f"tip{self.run.name}"


def places(home: Path | None = None) -> Places:
    """The places of the private engine below `home` (default: this user's cache folder)."""
    root = (home or cache_home()).absolute() / "engine"
    return Places(root, RUN / sha256_bytes(str(root).encode())[:8])
