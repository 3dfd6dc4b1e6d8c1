"""`docker buildx build` as a function: the one way in which stages are built."""

from __future__ import annotations

import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline import log
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.errors import BuildError
from pipeline.contract.files import write_whole
from pipeline.run import ProcessFailed, ProcessTimedOut, run

from .devicerun import ALLOW, with_devices
from .needed import needed
from .pinned import pin_contexts

# A line that a RUN step printed, in `--progress=plain`: "#12 3.456 text".
_STEP_LINE = re.compile(r"#\d+ (?:\d+\.\d+ )(.*)")
_LOST = "failed to stat lower snapshot"
_ERROR_LINE = re.compile(r"(?:#\d+ )?ERROR: (.*)")


class StageFailed(BuildError):
    """A stage did not build; the last lines of the failing step are the details."""


class SnapshotLost(StageFailed):
    """BuildKit cannot merge a linked copy over a base of which it built a part before (moby/buildkit#6977)."""


@dataclass(frozen=True)
class Export:
    """An OCI layout that receives a build's image instead of the engine; blobs that it has already are not sent again.

    It holds an index: the image's manifest and BuildKit's attestations, provenance always and with `scanner` (an image)
    an SBOM. `compression` (zstd) is that of all its layers; empty keeps theirs.

    `name` is the subject of those. `annotations` are put on the index and on the image's manifest.
    """

    layout: Path
    name: str
    annotations: Mapping[str, str]
    scanner: str = ""
    compression: str = ""
    provenance: str = "mode=max"

    def words(self) -> list[str]:
        """The options of `docker buildx build`."""
        words = [
            f"--provenance={self.provenance}",
            "--output",
            f"type=oci,tar=false,dest={self.layout},name={self.name}",
        ]
        if self.compression:
            words[-1] += f",compression={self.compression},force-compression=true,oci-mediatypes=true"
        if self.scanner:
            words += ["--attest", f"type=sbom,generator={self.scanner}"]
        for name, value in sorted(self.annotations.items()):
            for where in ("index", "manifest"):  # buildx 0.13 takes one place an option
                words += ["--annotation", f"{where}:{name}={value}"]
        return words


@dataclass(frozen=True)
class Stage:
    """One build: a target of the Dockerfile, its named contexts (name to directory), ARGs and labels.

    `output` is a directory that receives the target's files; `export` an OCI layout that receives the image; without
    either the image is loaded into the engine. `devices` are CDI devices for the tuning step; `shm_size` the bytes of
    shared memory of every step (0: as it is). A build that outlives `max_wait` seconds is ended: `ProcessTimedOut`.
    """

    target: str
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    output: Path | None = None
    export: Export | None = None
    devices: tuple[str, ...] = ()
    shm_size: int = 0
    max_wait: float | None = None


@dataclass(frozen=True)
class Built:
    """What BuildKit says of an image: the digest of its config, and the id by which the engine knows it.

    Of an image that was exported: no config digest, and the digest of its index.
    """

    config_digest: str
    image_id: str


@dataclass(frozen=True)
class Builder:
    """How to reach BuildKit: the client's environment, the Dockerfile's text and where it is written, an empty main
    context, the log.
    """

    environment: Mapping[str, str]
    dockerfile: bytes
    folder: Path
    empty: Path
    log: Path

    def command(self, stage: Stage, metadata: Path | None = None) -> list[str]:
        """The whole command line of a build, sorted so that it is the same every time."""
        dockerfile = with_devices(self.dockerfile, stage.devices) if stage.devices else self.dockerfile
        text, contexts = pin_contexts(dockerfile, stage.contexts)
        text = needed(text, stage.target)
        file = self.folder / f"Dockerfile-{sha256_bytes(text)[:24]}"
        write_whole(file, text)
        words = ["docker", "buildx", "build", "--progress=plain", "--network=none"]
        words += ["--provenance=false"] if stage.export is None else stage.export.words()
        words += ["--file", str(file), "--target", stage.target]
        if stage.devices:
            words += ALLOW
        if stage.shm_size:
            words += ["--shm-size", str(stage.shm_size)]
        for name, place in sorted(contexts.items()):
            if name.encode() not in text:
                continue
            words += ["--build-context", f"{name}={place}"]
        for name, value in sorted(stage.arguments.items()):
            words += ["--build-arg", f"{name}={value}"]
        for name, value in sorted(stage.labels.items()):
            words += ["--label", f"{name}={value}"]
        if stage.output is not None:
            words += ["--output", f"type=local,dest={stage.output}"]
        if metadata is not None:
            words += ["--metadata-file", str(metadata)]
        return [*words, str(self.empty)]

    def build(self, stage: Stage, *, on_line: Callable[[str], None] | None = None) -> Built:
        """Build one stage; `on_line` sees what its RUN steps print. Raise `StageFailed`.

        Where BuildKit has lost a snapshot that it merges linked copies over, a stage that is read back as files is
        built with plain copies: the same files, in layers that nobody keeps. For an image that is `SnapshotLost`.
        """
        try:
            return self._build(stage, on_line)
        except SnapshotLost:
            if stage.output is None:
                raise
            log.note("BuildKit has lost a snapshot of the base: built with plain copies instead")
            plain = replace(self, dockerfile=self.dockerfile.replace(b"COPY --link ", b"COPY "))
            return plain._build(stage, on_line)

    def _build(self, stage: Stage, on_line: Callable[[str], None] | None) -> Built:
        said: deque[str] = deque(maxlen=20)

        def told(line: str) -> None:
            match = _STEP_LINE.match(line)
            if match:
                said.append(match.group(1))
                if on_line is not None:
                    on_line(match.group(1))

        with tempfile.TemporaryDirectory(prefix="buildx-") as temporary:
            metadata = Path(temporary) / "metadata.json"
            try:
                run(
                    self.command(stage, metadata), env=self.environment, log=self.log, on_line=told,
                    timeout=stage.max_wait,
                )  # fmt: skip
            except ProcessTimedOut:
                raise  # whoever gave the bound knows what outlived it
            except ProcessFailed as error:
                if any(_LOST in line for line in error.details):
                    raise SnapshotLost(
                        f"stage {stage.target} did not build: BuildKit has lost a snapshot of the base",
                        details=error.details,
                        hint="empty its cache and build again: docker buildx prune --all --force",
                        log=str(self.log),
                    ) from error
                raise StageFailed(
                    f"stage {stage.target} did not build: {_reason(said, error.details)}",
                    details=tuple(said) or error.details,
                    hint="the lines above are the last that the failing step printed; the log has all of them",
                    log=str(self.log),
                ) from error
            if stage.output is not None:
                return Built("", "")
            facts = json.loads(metadata.read_text(encoding="utf-8"))
        config = str(facts.get("containerimage.config.digest", ""))
        return Built(config, str(facts.get("containerimage.digest", config)))


def _reason(said: Sequence[str], tail: Sequence[str]) -> str:
    """The last thing that a step said, or else what the builder itself says of its failure."""
    for line in reversed(said):
        if line.strip():
            return line.strip()[:200]
    for line in reversed(tail):
        match = _ERROR_LINE.match(line)
        if match and match.group(1).strip():
            return match.group(1).strip()[:200]
    return "no reason was printed"
