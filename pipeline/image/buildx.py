"""`docker buildx build` as a function: the one way in which images are built, but for a GPU in the classic builder."""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import BuildError, DockerError
from pipeline.contract.files import write_whole
from pipeline.run import ProcessFailed, ProcessTimedOut, run

from .dockerfile import pin_contexts, with_devices, without_links
from .session import Session

_STEP_LINE = re.compile(r"#\d+ (?:\d+\.\d+ )(.*)")  # what a RUN step printed, in `--progress=plain`
_ERROR_LINE = re.compile(r"(?:#\d+ )?ERROR: (.*)")
_LOST = "failed to stat lower snapshot"  # moby/buildkit#6977
_NO_ROOM = "no space left on device"
ALLOW = ("--allow", "device")
_PROBE_TIMEOUT = 120.0  # seconds
# A step that has a GPU sees the driver's device files; the name of the first differs under WSL.
_LOOK = "test -e /dev/nvidiactl -o -e /dev/dxg"


class SnapshotLost(BuildError):
    """BuildKit cannot merge a linked copy over a base of which it built a part before (moby/buildkit#6977)."""


@dataclass(frozen=True)
class Export:
    """An OCI layout that receives a build's image instead of the engine; blobs that it has already are not sent again.

    It holds an index: the image's manifest and BuildKit's attestations, provenance always and with `scanner` (an image)
    an SBOM. `compression` (zstd) is that of all its layers; empty keeps theirs. `name` is the subject of those.
    `annotations` are put on the index and on the image's manifest.
    """

    layout: Path
    name: str
    annotations: Mapping[str, str]
    scanner: str = ""
    compression: str = ""
    provenance: str = "mode=max"

    def words(self) -> list[str]:
        """The options of `docker buildx build`."""
        output = f"type=oci,tar=false,dest={self.layout},name={self.name}"
        if self.compression:
            output += f",compression={self.compression},force-compression=true,oci-mediatypes=true"
        words = [f"--provenance={self.provenance}", "--output", output]
        if self.scanner:
            words += ["--attest", f"type=sbom,generator={self.scanner}"]
        for name, value in sorted(self.annotations.items()):
            for where in ("index", "manifest"):  # buildx 0.13 takes one place an option
                words += ["--annotation", f"{where}:{name}={value}"]
        return words


@dataclass(frozen=True)
class Build:
    """One build: a target of a Dockerfile, its named contexts (name to folder), ARGs and labels.

    `output` is a folder that receives the target's files, `export` an OCI layout that receives the image; with
    `cache_only` nothing leaves BuildKit's cache; else the engine gets the image, under the name `tag`. `devices` are
    CDI devices of the tuning step, `shm_size` bytes of shared memory of every step, `timeout` seconds.
    """

    dockerfile: bytes
    target: str
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    output: Path | None = None
    export: Export | None = None
    cache_only: bool = False
    devices: tuple[str, ...] = ()
    shm_size: int = 0
    timeout: float | None = None


@dataclass(frozen=True)
class Built:
    """What BuildKit says of an image: the digest of its config, and the id by which the engine knows it.

    Of an image that was exported: no config digest, and the digest of its index.
    """

    config_digest: str
    image_id: str


def command(session: Session, wanted: Build, metadata: Path | None = None) -> list[str]:
    """The whole command line of a build, sorted so that it is the same every time."""
    text = with_devices(wanted.dockerfile, wanted.devices) if wanted.devices else wanted.dockerfile
    text, contexts = pin_contexts(text, wanted.contexts)
    folder = session.home / "contexts"
    file = folder / f"Dockerfile-{sha256_bytes(text)[:24]}"
    write_whole(file, text)
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    words = ["docker", "buildx", "build", "--progress=plain", "--network=none"]
    words += ["--provenance=false"] if wanted.export is None else wanted.export.words()
    words += ["--file", str(file), "--target", wanted.target]
    words += ALLOW if wanted.devices else ()
    words += ["--shm-size", str(wanted.shm_size)] if wanted.shm_size else ()
    for name, place in sorted(contexts.items()):
        words += ["--build-context", f"{name}={place}"]
    for name, value in sorted(wanted.arguments.items()):
        words += ["--build-arg", f"{name}={value}"]
    for name, value in sorted(wanted.labels.items()):
        words += ["--label", f"{name}={value}"]
    words += ["--tag", wanted.tag] if wanted.tag else ()
    words += ["--output", f"type=local,dest={wanted.output}"] if wanted.output is not None else ()
    words += ["--output", "type=cacheonly"] if wanted.cache_only else ()
    words += ["--metadata-file", str(metadata)] if metadata is not None else ()
    return [*words, str(empty)]


def build(session: Session, wanted: Build, *, on_line: Callable[[str], None] | None = None) -> Built:
    """Build one target; `on_line` sees what its RUN steps print. Raise `BuildError`, or `DockerError`.

    Where BuildKit has lost a snapshot that it merges linked copies over, what is read back as files is built with plain
    copies: the same files, in layers that nobody keeps. For an image that is `SnapshotLost`.
    """
    try:
        return _build(session, wanted, on_line)
    except SnapshotLost:
        if wanted.output is None and not wanted.cache_only:
            raise
        log.note("BuildKit has lost a snapshot of the base: built with plain copies instead")
        return _build(session, replace(wanted, dockerfile=without_links(wanted.dockerfile)), on_line)


def _build(session: Session, wanted: Build, on_line: Callable[[str], None] | None) -> Built:
    from pipeline.daemon.buildx import environment

    said: deque[str] = deque(maxlen=20)

    def heard(line: str) -> None:
        match = _STEP_LINE.match(line)
        if match:
            said.append(match.group(1))
            if on_line is not None:
                on_line(match.group(1))

    with tempfile.TemporaryDirectory(dir=session.home / "contexts", prefix=".buildx-") as temporary:
        metadata = Path(temporary) / "metadata.json"
        words = command(session, wanted, metadata)
        try:
            run(words, env=environment(session.engine), log=session.log, on_line=heard, timeout=wanted.timeout)
        except ProcessTimedOut:
            raise  # whoever gave the timeout knows what outlived it
        except ProcessFailed as error:
            raise _failed(session, wanted.target, tuple(said), error) from error
        if wanted.output is not None or wanted.cache_only:
            return Built("", "")
        facts = json.loads(metadata.read_text(encoding="utf-8"))
    config = str(facts.get("containerimage.config.digest", ""))
    return Built(config, str(facts.get("containerimage.digest", config)))


def _failed(session: Session, target: str, said: Sequence[str], error: ProcessFailed) -> Exception:
    """Why a build failed: the engine went, a disk is full, a known bug of BuildKit, or what the step itself said."""
    lines = (*error.details, *said)
    full = next((line for line in reversed(lines) if _NO_ROOM in line.lower()), "")
    if full:
        return BuildError(
            f"target {target} did not build: no space left ({full.strip()[:160]})",
            hint="`docker buildx prune` and `pipeline clean` free space; `docker info` names the engine's data root",
            log=str(session.log),
        )
    if not session.answers():
        return DockerError(
            f"the Docker Engine at {session.engine.host} went away while target {target} was built",
            details=said,
            hint="`pipeline daemon status`; the same command again goes on",
            log=str(session.log),
        )
    if any(_LOST in line for line in error.details):
        return SnapshotLost(
            f"target {target} did not build: BuildKit has lost a snapshot of the base",
            details=error.details,
            hint="empty its cache and build again: docker buildx prune --all --force",
            log=str(session.log),
        )
    return BuildError(
        f"target {target} did not build: {_reason(said, error.details)}",
        details=said or error.details,
        hint="the lines above are the last that the failing step printed",
        log=str(session.log),
    )


def _reason(said: Sequence[str], tail: Sequence[str]) -> str:
    """The last thing that a step said, or else what the builder itself says of its failure."""
    for line in reversed(said):
        if line.strip():
            return line.strip()[:200]
    for line in reversed(tail):
        match = _ERROR_LINE.match(line)
        if match and match.group(1).strip():
            return match.group(1).strip()[:200]
    return tail[-1].strip()[:200] if tail and tail[-1].strip() else "no reason was printed"


def why_no_device(session: Session, base: str, devices: Sequence[str]) -> str:
    """Why this engine's builder gives a RUN step no GPU; empty when it does.

    It needs buildx 0.22, the Dockerfile frontend 1.27, a BuildKit that grants the entitlement, and CDI. Nothing tells
    the frontend's version, so the builder is given a step to build.
    """
    from pipeline.daemon import buildx

    version = buildx.version()
    if version < buildx.DEVICE:
        have, need = (".".join(map(str, one)) for one in (version, buildx.DEVICE[:2]))
        return f"buildx is {have}; `--allow device` came with {need}"
    flags = " ".join(f"--device={name}" for name in devices)
    text = f"FROM {base}\nRUN {flags} --network=none : {secrets.token_hex(4)} && {_LOOK}\n"
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        (Path(folder) / "Dockerfile").write_text(text, encoding="utf-8")
        words = ["docker", "buildx", "build", "--progress=plain", "--output=type=cacheonly", *ALLOW, folder]
        try:
            run(words, env=buildx.environment(session.engine), log=session.log, timeout=_PROBE_TIMEOUT)
        except ProcessFailed as error:
            return refusal(error.details)
    return ""


def refusal(said: Sequence[str]) -> str:
    """A builder's refusal of `RUN --device` in plain words."""
    errors = [match[1] for line in said if (match := _ERROR_LINE.match(line))]
    last = errors[-1] if errors else (said[-1] if said else "no reason was printed")
    if "unknown flag: device" in last:
        return "the engine's Dockerfile frontend does not know `RUN --device`, which 1.27 does"
    if "entitlement" in last or "not allowed" in last:
        return f"the builder does not grant devices: {last[:200]}"
    return "a step was given the device and saw no GPU" if "exit code: 1" in last else last[:200]
