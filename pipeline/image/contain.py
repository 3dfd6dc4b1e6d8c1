"""Running a container to its end and reading files out of one, and always removing it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Thread
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import BuildError

from .gpus import NO_GPUS, Gpus

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

LABEL = "tuned-image-pipeline"


class ContainerTooSlow(BuildError):
    """A container outlived its bound; the details are the end of its log."""


@dataclass(frozen=True)
class Sandbox:
    """How a container is shut in: user, root file system, where it may write, environment, shared memory in bytes."""

    user: str = ""
    read_only: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    shm_size: int = 1 << 30
    gpus: Gpus = NO_GPUS
    host_pids: bool = False  # see the processes of the engine's host
    volume: tuple[str, bytes] | None = None  # a path, and a tar stream that is unpacked there before the start

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments; never any network."""
        chosen: dict[str, Any] = {
            "network_mode": "none",
            "working_dir": "/",  # Python looks for modules there first, and the image's own may hold a `pipeline`
            "environment": dict(self.environment),
            "shm_size": self.shm_size,
            "labels": {LABEL: "running"},
        }
        chosen |= self.gpus.options()
        if self.host_pids:
            chosen["pid_mode"] = "host"
        if self.volume is not None:
            chosen["volumes"] = [self.volume[0]]  # a nameless one, removed with the container
        if self.user:
            chosen["user"] = self.user
        if self.read_only:
            chosen |= {"read_only": True, "tmpfs": {"/tmp": "rw,mode=1777"}}  # noqa: S108 - inside the container
        return chosen

    def words(self) -> list[str]:
        """The docker CLI's words for the same."""
        words = [
            "--network",
            "none",
            "--workdir",
            "/",
            "--shm-size",
            str(self.shm_size),
            "--entrypoint",
            "",
            *self.gpus.words(),
        ]
        for name, value in sorted(self.environment.items()):
            words += ["--env", f"{name}={value}"]
        if self.user:
            words += ["--user", self.user]
        if self.read_only:
            words += ["--read-only", "--tmpfs", "/tmp:rw,mode=1777"]  # noqa: S108 - inside the container
        return words


@dataclass(frozen=True)
class Ended:
    """Exit status, what was printed on stdout, and the last lines on stderr."""

    status: int
    stdout: str
    stderr: tuple[str, ...]


@contextlib.contextmanager
def created(client: DockerClient, image: str, command: Sequence[str], sandbox: Sandbox) -> Iterator[Container]:
    """A container that was created and not started; removed on the way out, whatever happened."""
    # Named by us and beforehand: an interrupt may come after the engine made it and before we were told its id.
    name = f"{LABEL}-{secrets.token_hex(8)}"
    made = False
    try:
        container = client.containers.create(image, list(command), name=name, entrypoint=[], **sandbox.options())
        made = True
        if sandbox.volume is not None:
            container.put_archive(*sandbox.volume)
        yield container
    finally:
        _remove(client, name, patience=0.0 if made else 2.0)


def _remove(client: DockerClient, name: str, *, patience: float) -> None:
    """Remove a container, running or not; wait `patience` seconds for one that the engine may be about to finish."""
    from docker.errors import APIError, NotFound

    until = time.monotonic() + patience
    while True:
        try:
            client.api.remove_container(name, force=True, v=True)
        except NotFound:
            if time.monotonic() >= until:
                return
            time.sleep(0.1)
        except APIError as error:
            if error.status_code != HTTPStatus.CONFLICT:  # it is being removed already
                raise
            return
        else:
            return


def finish(container: Container, what: str, *, max_wait: float, on_line: Callable[[str], None] | None = None) -> int:
    """Start a created container and wait for its end, at most `max_wait` seconds; return its exit status.

    `on_line` sees what it prints as it is printed. Raise `ContainerTooSlow` with the end of its log.
    """
    container.start()
    if on_line is not None:
        Thread(target=_repeat, args=(container, on_line), daemon=True).start()
    return _await(container, what, max_wait)


def _await(container: Container, what: str, max_wait: float) -> int:
    from requests.exceptions import ConnectionError as Disconnected
    from requests.exceptions import ReadTimeout

    began = time.monotonic()
    try:
        return int(container.wait(timeout=max_wait)["StatusCode"])
    except (ReadTimeout, Disconnected) as error:
        said = container.logs(tail=50).decode(errors="replace").splitlines()
        raise ContainerTooSlow(
            f"{what} did not end within {time.monotonic() - began:.0f} s",
            details=said,
            hint="raise the bound if the host is slow; the container was removed",
        ) from error


def _repeat(container: Container, on_line: Callable[[str], None]) -> None:
    pending = ""
    for chunk in container.logs(stream=True, follow=True):
        *lines, pending = (pending + chunk.decode(errors="replace")).split("\n")
        for line in lines:
            on_line(line)


def run_to_end(client: DockerClient, image: str, command: Sequence[str], sandbox: Sandbox, *, max_wait: float) -> Ended:
    """Run a container to its end, at most `max_wait` seconds; raise `ContainerTooSlow`."""
    (ended,) = run_side_by_side(client, image, command, [sandbox], max_wait=max_wait)
    return ended


def run_side_by_side(
    client: DockerClient, image: str, command: Sequence[str], sandboxes: Sequence[Sandbox], *, max_wait: float
) -> list[Ended]:
    """Run one command in several containers at one time to their ends, all within `max_wait` seconds.

    Raise `ContainerTooSlow` for the first that does not; all are removed.
    """
    until = time.monotonic() + max_wait
    with contextlib.ExitStack() as stack:
        containers = [stack.enter_context(created(client, image, command, sandbox)) for sandbox in sandboxes]
        for container in containers:
            container.start()
        what = " ".join(command[:4])
        return [_ended(one, _await(one, what, max(1.0, until - time.monotonic()))) for one in containers]


def _ended(container: Container, status: int) -> Ended:
    stdout = container.logs(stdout=True, stderr=False).decode(errors="replace")
    stderr = container.logs(stdout=False, stderr=True, tail=20).decode(errors="replace").splitlines()
    return Ended(status, stdout, tuple(stderr))
