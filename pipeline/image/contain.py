"""Running a container to its end and reading files out of one, and always removing it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import BuildError

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

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments; never any network."""
        chosen: dict[str, Any] = {
            "network_mode": "none",
            "environment": dict(self.environment),
            "shm_size": self.shm_size,
            "labels": {LABEL: "running"},
            "init": True,  # reaps what a killed launcher leaves behind
        }
        if self.user:
            chosen["user"] = self.user
        if self.read_only:
            chosen |= {"read_only": True, "tmpfs": {"/tmp": "rw,mode=1777"}}  # noqa: S108 - inside the container
        return chosen


@dataclass(frozen=True)
class Ended:
    """Exit status, what was printed on stdout, and the last lines on stderr."""

    status: int
    stdout: str
    stderr: tuple[str, ...]


@contextlib.contextmanager
def created(client: DockerClient, image: str, command: Sequence[str], sandbox: Sandbox) -> Iterator[Container]:
    """A container that was created and not started; removed on the way out, whatever happened."""
    container = client.containers.create(image, list(command), entrypoint=[], **sandbox.options())
    try:
        yield container
    finally:
        with contextlib.suppress(Exception):
            container.remove(force=True, v=True)


def run_to_end(client: DockerClient, image: str, command: Sequence[str], sandbox: Sandbox, *, max_wait: float) -> Ended:
    """Start a container and wait for its end, at most `max_wait` seconds; raise `ContainerTooSlow`."""
    from requests.exceptions import ConnectionError as Disconnected
    from requests.exceptions import ReadTimeout

    with created(client, image, command, sandbox) as container:
        began = time.monotonic()
        container.start()
        try:
            status = int(container.wait(timeout=max_wait)["StatusCode"])
        except (ReadTimeout, Disconnected) as error:
            said = container.logs(tail=20).decode(errors="replace").splitlines()
            raise ContainerTooSlow(
                f"{' '.join(command[:4])} did not end within {time.monotonic() - began:.0f} s",
                details=said,
                hint="raise --startup-max-wait if the host is slow; the container was removed",
            ) from error
        stdout = container.logs(stdout=True, stderr=False).decode(errors="replace")
        stderr = container.logs(stdout=False, stderr=True, tail=20).decode(errors="replace").splitlines()
    return Ended(status, stdout, tuple(stderr))
