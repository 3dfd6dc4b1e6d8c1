"""Three ways to run the tuner, which leave the same folder.

    stage       a RUN step of BuildKit's, where no GPU is needed
    classic     a RUN step of the classic builder, where the engine's default runtime gives every container the GPUs
                (BuildKit ignores that runtime)
    container   the tuner image as a container with the engine's GPUs, its folder copied out

Each leaves `failure.json` instead of a cache when the ranks fail, and ends without an error of its own. What an
interrupted tuning had finished lies in <cache home>/unfinished/<digest>/, by a digest of what is tuned, one file an op;
a RUN step of BuildKit keeps it in a cache mount of that name. The ranks check these files, not the host.
"""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.errors import BuildError, PipelineError, UsageError, WarmUpError
from pipeline.contract.files import scratch
from pipeline.contract.places import CACHE_ROOT, ENV_WORKSPACE, PLAN_FILE, STATE_ROOT, TUNER_ROOT

from .buildx import Build, build
from .containers import SHM, ContainerSpec, created, follow, tar_of
from .gpus import Gpus
from .modules import WORKSPACE
from .session import LABEL, RUN, Session, drop_image

if TYPE_CHECKING:
    from docker.models.containers import Container

Form = Literal["stage", "classic stage", "container"]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OP = re.compile(r"\s*(\d+)/(\d+) ")  # the tuner begins op k of n
_PREVIOUS, _OUT = "/previous", "/out"
_EVERY = 2.0  # seconds between two copies of finished ops at least


def select(session: Session, wanted: str, *, device: str, gpus: Gpus) -> Form:
    """Choose a way to run the tuner and say why; raise `UsageError` where the wanted one cannot work."""
    form, reason = _select(session, wanted, device=device, gpus=gpus)
    log.note(f"tune in: {form} ({reason})")
    return form


def _select(session: Session, wanted: str, *, device: str, gpus: Gpus) -> tuple[Form, str]:
    if wanted == "container":
        return "container", "as --tune-in says"
    if device == "cpu":
        return "stage", "no GPU is needed"
    if gpus.access == "default-runtime":
        return "classic stage", "the engine's default runtime is nvidia, which the classic builder honours"
    if wanted == "stage":
        runtime = session.engine.default_runtime or "another"
        raise UsageError(
            f"TUNE_IN=stage: a RUN step gets GPUs, all of them, where the default runtime is nvidia, not {runtime}",
            hint="TUNE_IN=container uses the engine's CDI devices or its nvidia runtime; or leave GPUS= out",
        )
    return "container", f"the engine gives containers its GPUs by {gpus.access}, and no build step"


@dataclass(frozen=True)
class Unfinished:
    """The folder of finished ops, by a digest of what is tuned; `anew` does not resume from it."""

    place: Path
    anew: bool = False

    def options(self) -> tuple[str, ...]:
        """For the tuner, beside `--state`, which every way of running it has."""
        return ("--no-resume",) if self.anew else ()

    def folder(self) -> Path:
        """The folder, empty where nothing is resumed."""
        if self.anew:
            self.drop()
        self.place.mkdir(parents=True, exist_ok=True)
        return self.place

    def drop(self) -> None:
        """Forget it: the tuning ended well."""
        shutil.rmtree(self.place, ignore_errors=True)

    def copy_from(self, container: Container) -> None:
        """Copy what a container holds, running or ended; what cannot be had is left."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        with contextlib.suppress(DockerException, RequestException, PipelineError, OSError):
            chunks, _ = container.get_archive(STATE_ROOT)
            with scratch(self.place.parent, ".copying-") as work:
                safe_extract(chunks, work / "state", strip=1)
                (work / "state").mkdir(exist_ok=True)
                if self.place.exists():
                    self.place.rename(work / "old")
                (work / "state").rename(self.place)


def tuner_words(options: Sequence[str]) -> list[str]:
    """What runs in the image, in every way; the Dockerfile's RUN says the same."""
    words = ["python3", f"{TUNER_ROOT}/run.py", "pipeline.tune", f"{TUNER_ROOT}/{PLAN_FILE}", _OUT, "--stage"]
    return [*words, "--previous", _PREVIOUS, "--state", STATE_ROOT, *options]


def repeat(line: str) -> None:
    """Repeat a line of the ranks; the tuner's own result, which the manifest holds in full, is left out."""
    plain = _COLOURS.sub("", line).rstrip()  # the classic builder paints what a step says on stderr
    if plain and not plain.startswith("{"):
        log.note(f"│ {plain}")
        op = _OP.match(plain)
        log.progress(plain[op.end() :] if op else plain.strip(), *((int(op[1]) - 1, int(op[2])) if op else ()))


@dataclass(frozen=True)
class Job:
    """One tuning: the build of its stage `tuned`, the tuner's options, the cache to start from, time in seconds."""

    session: Session
    stage: Build
    options: tuple[str, ...]
    previous: Path
    unfinished: Unfinished
    gpus: Gpus
    timeout: float

    def run(self, form: Form, tuner: str, place: Path) -> None:
        """Fill `place` with what lies from `/` of the stage `tuned`. `tuner` is the id of the tuner image."""
        words = (*self.options, *self.unfinished.options())
        if form == "stage":
            self._in_stage(words, place)
        elif form == "classic stage":
            self._in_classic_stage(words, tuner, place)
        else:
            self._in_container(words, tuner, place)

    def _in_stage(self, words: Sequence[str], place: Path) -> None:
        """BuildKit's RUN step. A new TUNE_ATTEMPT each time keeps a failed step out of the build cache."""
        attempt = {
            "TUNE_ATTEMPT": secrets.token_hex(8),
            "TUNE_STATE": self.unfinished.place.name[:32],
            "TUNE_OPTIONS": " ".join(words),
        }
        arguments = {**self.stage.arguments, **attempt}
        stage = replace(self.stage, arguments=arguments, output=place, timeout=self.timeout)
        build(self.session, stage, on_line=repeat)

    def _in_classic_stage(self, words: Sequence[str], tuner: str, place: Path) -> None:
        """The classic builder, through the SDK. It has no cache mount: finished ops are copied in with the context, and
        out of the step's image. They are lost when the build itself is interrupted.
        """
        log.note("the classic builder keeps finished ops when ranks fail, not when it is interrupted (container does)")
        client, tag = self.session.client, self.session.candidate
        dockerfile = (
            f"FROM {tuner}\nUSER root\nWORKDIR /\nCOPY previous {_PREVIOUS}\nCOPY state {STATE_ROOT}\n"
            f"RUN : attempt {secrets.token_hex(8)} && {ENV_WORKSPACE}={WORKSPACE} {' '.join(tuner_words(words))}\n"
        )
        folders = {"previous": self.previous, "state": self.unfinished.folder()}
        context = io.BytesIO(tar_of(folders, {"Dockerfile": dockerfile.encode()}))
        try:
            events = client.api.build(
                fileobj=context, custom_context=True, tag=tag, rm=True, forcerm=True, nocache=True,
                network_mode="none", shmsize=SHM, decode=True, labels={LABEL: RUN},
            )  # fmt: skip
            classic_lines(events, repeat)
            with created(client, tag, ["true"], ContainerSpec()) as container:
                self.unfinished.copy_from(container)
                _copy_out(container, place)
        finally:
            drop_image(client, tag)

    def _in_container(self, words: Sequence[str], tuner: str, place: Path) -> None:
        """The tuner image as a container; finished ops are copied out while it runs."""
        spec = ContainerSpec(user="0:0", environment={ENV_WORKSPACE: WORKSPACE}, gpus=self.gpus)
        with created(self.session.client, tuner, tuner_words(words), spec) as container:
            folders = {_PREVIOUS.lstrip("/"): self.previous, STATE_ROOT.lstrip("/"): self.unfinished.folder()}
            container.put_archive("/", tar_of(folders))
            last = time.monotonic()

            def heard(line: str) -> None:
                nonlocal last
                repeat(line)
                if time.monotonic() - last >= _EVERY:
                    self.unfinished.copy_from(container)
                    last = time.monotonic()

            try:
                status = follow(container, "tuning", timeout=self.timeout, on_line=heard)
            finally:
                self.unfinished.copy_from(container)
                kept = len(list(self.unfinished.place.glob("*.json")))
                if kept:
                    log.note(f"{kept} finished pieces of the tuning are kept: the same command resumes from them")
            if status != 0:
                raise WarmUpError(
                    f"the tuning container ended with {status}: {_meaning(status)}",
                    details=container.logs(tail=10).decode(errors="replace").splitlines(),
                    hint="run the same command again: it resumes",
                )
            _copy_out(container, place)


def _copy_out(container: Container, place: Path) -> None:
    chunks, _ = container.get_archive(_OUT)
    safe_extract(chunks, place / CACHE_ROOT.lstrip("/"), strip=1)


def _meaning(status: int) -> str:
    """What an exit status of a container says; above 128 a signal ended its first process."""
    try:
        return f"ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return "it gave no reason"


def classic_lines(events: Iterator[dict[str, Any]], on_line: Callable[[str], None]) -> None:
    """Read the classic builder's stream to its end; raise `BuildError` with its last lines on an error."""
    said: list[str] = []
    pending = ""
    for event in events:
        if "error" in event:
            raise BuildError(
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
