"""Containers that run to their end: no network, no capabilities, always removed."""

from __future__ import annotations

import contextlib
import io
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import BuildError, DockerError
from pipeline.contract.places import TUNER_ROOT

from .gpus import NO_GPUS, Gpus
from .session import LABEL, RUN, drop_container

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

NAME = "tuned-image-pipeline"
ANYBODY = "65532:65532"  # a user that no image knows: no name, no home
SHM = 1 << 30  # bytes of shared memory: NCCL and torch's loaders fail in the 64 MiB of a plain container


class ContainerTimeout(BuildError):
    """A container did not end in time; the details are the end of its log."""


@dataclass(frozen=True)
class ContainerSpec:
    """How a container is run.

    `files` maps a folder of the container to a tar stream that is unpacked there before the start, into a nameless
    volume: this also works where the root is read-only and the engine is on another host.
    """

    user: str = ""
    read_only: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: Gpus = NO_GPUS
    files: Mapping[str, bytes] = field(default_factory=dict)
    shm_size: int = SHM

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments."""
        chosen: dict[str, Any] = {
            "network_mode": "none",
            "working_dir": "/",  # Python looks for modules there first
            "environment": dict(self.environment),
            "shm_size": self.shm_size,
            "labels": {LABEL: RUN},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            **self.gpus.options(),
        }
        if self.files:
            chosen["volumes"] = list(self.files)
        if self.user:
            chosen["user"] = self.user
        if self.read_only:
            chosen |= {"read_only": True, "tmpfs": {"/tmp": "rw,exec,mode=1777"}}  # noqa: S108 - inside the container
        return chosen


@dataclass(frozen=True)
class Ended:
    """Exit status, what was printed on stdout, and the last lines on stderr."""

    status: int
    stdout: str
    stderr: tuple[str, ...]


@contextlib.contextmanager
def created(client: DockerClient, image: str, command: Sequence[str], spec: ContainerSpec) -> Iterator[Container]:
    """A container that is not started yet; removed on the way out, whatever happened."""
    # We choose the name: an interrupt may come after the engine made it and before its id arrived here.
    name = f"{NAME}-{secrets.token_hex(8)}"
    made = False
    try:
        container = client.containers.create(image, list(command), name=name, entrypoint=[], **spec.options())
        made = True
        for folder, stream in spec.files.items():
            container.put_archive(folder, stream)
        yield container
    finally:
        if not made:
            time.sleep(0.5)  # the engine may be about to finish it
        drop_container(client, name)


def run_all(
    client: DockerClient, image: str, command: Sequence[str], specs: Sequence[ContainerSpec], *, timeout: float
) -> list[Ended]:
    """Run one command in several containers at once, all within `timeout` seconds; raise `ContainerTimeout`."""
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        containers = [stack.enter_context(created(client, image, command, spec)) for spec in specs]
        for container in containers:
            container.start()
        return [_ended(one, wait(one, command[0], max(1.0, until - time.monotonic()))) for one in containers]


def run_one(client: DockerClient, image: str, command: Sequence[str], spec: ContainerSpec, *, timeout: float) -> Ended:
    """Run a container to its end, within `timeout` seconds; raise `ContainerTimeout`."""
    return run_all(client, image, command, [spec], timeout=timeout)[0]


def follow(container: Container, what: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
    """Start a created container and give every line that it prints to `on_line`; return its exit status."""
    container.start()
    reader = Thread(target=_lines, args=(container, on_line), daemon=True)
    reader.start()
    status = wait(container, what, timeout)
    reader.join(10.0)
    return status


def wait(container: Container, what: str, timeout: float) -> int:
    """Wait for a container's end. Raise `ContainerTimeout`, or `DockerError` where the engine went meanwhile."""
    from docker.errors import DockerException
    from requests.exceptions import ConnectionError as Disconnected
    from requests.exceptions import ReadTimeout

    began = time.monotonic()
    try:
        return int(container.wait(timeout=timeout)["StatusCode"])
    except (ReadTimeout, Disconnected) as error:
        waited = time.monotonic() - began
        try:
            said = container.logs(tail=50).decode(errors="replace").splitlines()
        except (DockerException, Disconnected, OSError):
            said = None
        if said is None or (isinstance(error, Disconnected) and waited < timeout * 0.95):
            raise DockerError(
                f"the connection to the Docker Engine was lost while {what} ran",
                details=said or (),
                hint="check `pipeline daemon status`, then run the same command again: it resumes",
            ) from error
        raise ContainerTimeout(
            f"{what} did not end within {waited:.0f} s", details=said, hint="the container was removed"
        ) from error


def _lines(container: Container, on_line: Callable[[str], None]) -> None:
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    pending = ""
    with contextlib.suppress(DockerException, RequestException, OSError):  # `wait` says that the engine went
        for chunk in container.logs(stream=True, follow=True):
            *lines, pending = (pending + chunk.decode(errors="replace")).split("\n")
            for line in lines:
                on_line(line)


def _ended(container: Container, status: int) -> Ended:
    stdout = container.logs(stdout=True, stderr=False).decode(errors="replace")
    stderr = container.logs(stdout=False, stderr=True, tail=20).decode(errors="replace").splitlines()
    return Ended(status, stdout, tuple(stderr))


def tuner_command(module: str, *words: str) -> list[str]:
    """A module of the tuner with arguments, in a container that has the tuner below TUNER_ROOT."""
    return ["python3", f"{TUNER_ROOT}/launcher.py", module, *words]


def tar_of(folders: Mapping[str, Path], files: Mapping[str, bytes] | None = None) -> bytes:
    """A tar stream of folders and files by their names in it, readable by anyone, owned by root."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode |= 0o755 if info.isdir() else 0o444
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, folder in folders.items():
            tar.add(folder, arcname=name, filter=plain)
        for name, data in (files or {}).items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
