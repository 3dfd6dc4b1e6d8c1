"""Three ways to fill the directory that the stage `tuned` stands for; the same final image each time.

    stage       a RUN step of the build: BuildKit's, with a GPU `RUN --device`; or the classic builder's, where the
                engine's default runtime gives every container the GPUs (BuildKit ignores that runtime)
    container   the tuner image as a container with the engine's GPUs, its directory copied out
    import      a cache that was tuned elsewhere: nothing is filled, see `caches`

Each writes `failure.json` instead of a cache when the ranks fail, and ends without an error of its own. Finished ops of
a tuning that was interrupted are kept by `unfinished`.
"""

from __future__ import annotations

import io
import re
import secrets
import signal
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.errors import BuildError, WarmUpError
from pipeline.contract.places import CACHE_ROOT, PLAN_FILE, STATE_ROOT, TUNING_ROOT

from .buildkit import Builder, Stage
from .contain import LABEL, Sandbox, created, finish
from .gpus import Gpus
from .unfinished import Copier, Unfinished

if TYPE_CHECKING:
    from docker import DockerClient

WORKSPACE = "/tmp/workspace"  # noqa: S108 - inside the image
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREVIOUS = "/previous"
_OUT = "/out"
SHM = 1 << 30  # bytes of shared memory for the ranks: NCCL and torch's loaders fail in the 64 MiB of a plain container


class ClassicStageFailed(BuildError):
    """The classic builder could not run the tuning step."""


class ContainerEnded(WarmUpError):
    """The container that tuned was ended from outside."""


class Filler(Protocol):
    """Fills `place` with what the stage `tuned` holds."""

    def fill(self, place: Path) -> None:
        """Run the ranks."""


def command(options: Sequence[str]) -> list[str]:
    """What runs in the image, in every way of filling; the Dockerfile's RUN says the same."""
    words = ["python3", "-m", "pipeline.tune", f"{TUNING_ROOT}/{PLAN_FILE}", _OUT, "--stage"]
    return [*words, "--previous", _PREVIOUS, "--state", STATE_ROOT, *options]


def progress(line: str) -> None:
    """Repeat a line of the ranks; the tuner's own result, which the manifest holds in full, is left out."""
    plain = _COLOURS.sub("", line).rstrip()  # the classic builder paints what a step says on stderr
    if plain and not plain.startswith("{"):
        log.note(f"│ {plain}")


@dataclass(frozen=True)
class StageFiller:
    """BuildKit's RUN step. A new TUNE_ATTEMPT each time keeps a failed step out of the build cache.

    Finished ops stay in a cache mount that TUNE_STATE names.
    """

    builder: Builder
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str]
    options: Sequence[str]
    unfinished: Unfinished
    devices: tuple[str, ...] = ()
    shm_size: int = 0
    max_wait: float | None = None

    def stage(self, place: Path) -> Stage:
        """The build of `tuned` whose files fall into `place`."""
        options = " ".join((*self.options, *self.unfinished.options()))
        attempt = {"TUNE_ATTEMPT": secrets.token_hex(8), "TUNE_STATE": self.unfinished.name, "TUNE_OPTIONS": options}
        return Stage(
            "tuned", contexts=self.contexts, arguments={**self.arguments, **attempt}, output=place,
            devices=self.devices, shm_size=self.shm_size, max_wait=self.max_wait,
        )  # fmt: skip

    def fill(self, place: Path) -> None:
        """Build the stage `tuned` and let its files fall into `place`."""
        self.builder.build(self.stage(place), on_line=progress)


@dataclass(frozen=True)
class ClassicFiller:
    """The classic builder's RUN step, through the SDK: it alone honours the engine's default runtime.

    It has no cache mount. Finished ops are copied in with the context, and out of the step's image: they are kept when
    ranks fail, which the step survives, and lost when the build itself is interrupted.
    """

    client: DockerClient
    tuner: str
    previous: Path
    options: Sequence[str]
    unfinished: Unfinished
    shm_size: int = SHM

    def dockerfile(self, *, state: bool = True) -> str:
        """The Dockerfile of the one step; the attempt is part of it, so that nothing is found in a cache.

        With `state`, the context holds what an interrupted tuning had finished.
        """
        words = " ".join(command([*self.options, *self.unfinished.options()]))
        return (
            f"FROM {self.tuner}\nUSER root\nWORKDIR /\nCOPY previous {_PREVIOUS}\n"
            f"{f'COPY state {STATE_ROOT}' if state else '# nothing to take up'}\n"
            f"RUN : attempt {secrets.token_hex(8)} && FLASHINFER_WORKSPACE_BASE={WORKSPACE} {words}\n"
        )

    def fill(self, place: Path) -> None:
        """Build the step, copy the directory out of its image, and remove that image."""
        log.note("the classic builder keeps finished ops when ranks fail, not when it is interrupted (container does)")
        with self._built() as image, created(self.client, image, ["true"], Sandbox()) as container:
            self.unfinished.take(container)
            chunks, _ = container.get_archive(_OUT)
            safe_extract(chunks, place / CACHE_ROOT.lstrip("/"), strip=1)

    def _context(self) -> io.BytesIO:
        folders = {"previous": self.previous, "state": self.unfinished.folder()}
        return _context(self.dockerfile(), folders)

    @contextmanager
    def _built(self) -> Iterator[str]:
        tag = f"{LABEL}/tuning:{secrets.token_hex(8)}"
        try:
            follow(
                self.client.api.build(
                    fileobj=self._context(), custom_context=True, tag=tag, rm=True,
                    forcerm=True, nocache=True, network_mode="none", shmsize=self.shm_size, decode=True,
                    labels={LABEL: "tuning"},
                ),
                progress,
            )  # fmt: skip
            yield tag
        finally:
            self.client.api.remove_image(tag, force=True) if _there(self.client, tag) else None


@dataclass(frozen=True)
class ContainerFiller:
    """The tuner image as a container with the engine's GPUs."""

    client: DockerClient
    tuner: str
    previous: Path
    options: Sequence[str]
    unfinished: Unfinished
    gpus: Gpus
    max_wait: float

    def sandbox(self) -> Sandbox:
        """How the container is shut in."""
        return Sandbox(user="0:0", environment={"FLASHINFER_WORKSPACE_BASE": WORKSPACE}, gpus=self.gpus, shm_size=SHM)

    def fill(self, place: Path) -> None:
        """Run it, stream what the ranks say, copy the directory out; the container is removed whatever happens."""
        words = command([*self.options, *self.unfinished.options()])
        with created(self.client, self.tuner, words, self.sandbox()) as container:
            container.put_archive("/", _folder(self.previous, _PREVIOUS.lstrip("/")))
            container.put_archive("/", _folder(self.unfinished.folder(), STATE_ROOT.lstrip("/")))
            copier = Copier(self.unfinished, container, progress)
            try:
                status = finish(container, "tuning", max_wait=self.max_wait, on_line=copier.see)
            finally:
                copier.last()
            if status != 0:
                raise ContainerEnded(
                    f"the tuning container ended with {status}: {_meaning(status)}",
                    details=container.logs(tail=10).decode(errors="replace").splitlines(),
                    hint="run the same command again; what was finished is taken up",
                )
            chunks, _ = container.get_archive(_OUT)
            safe_extract(chunks, place / CACHE_ROOT.lstrip("/"), strip=1)


def _meaning(status: int) -> str:
    """What an exit status of a container says; above 128 a signal ended its first process."""
    try:
        return f"ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return "it did not say why"


def _there(client: DockerClient, tag: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def _folder(folder: Path, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=name)
    return buffer.getvalue()


def _context(dockerfile: str, folders: Mapping[str, Path]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        data = dockerfile.encode()
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
        for name, folder in folders.items():
            tar.add(folder, arcname=name)
    buffer.seek(0)
    return buffer


def follow(events: Iterator[dict[str, Any]], on_line: Callable[[str], None]) -> None:
    """Read the classic builder's stream to its end; raise `ClassicStageFailed` with its last lines on an error."""
    said: list[str] = []
    pending = ""
    for event in events:
        if "error" in event:
            raise ClassicStageFailed(
                f"the tuning step did not build: {str(event['error']).strip()[:300]}",
                details=said[-20:],
                hint="TUNE_IN=container runs the same in a container",
            )
        pending += str(event.get("stream", ""))
        *lines, pending = pending.split("\n")
        for line in lines:
            said.append(line)
            if not line.startswith((" --->", "Step ", "Removing intermediate")):
                on_line(line)
