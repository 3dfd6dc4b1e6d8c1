"""`docker buildx build` as a function: the one way in which images are built."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contract.digest import sha256_bytes, sha256_json
from pipeline.contract.errors import BuildError, DockerError
from pipeline.contract.files import write_whole
from pipeline.run import ProcessFailed, run

from .contexts import Staging
from .session import Session

_STEP_LINE = re.compile(r"#\d+ (?:\d+\.\d+ )(.*)")  # what a RUN step printed, in `--progress=plain`
_ERROR_LINE = re.compile(r"(?:#\d+ )?ERROR: (.*)")
_FROM = re.compile(rb"(\bfrom=)([a-z][a-z0-9-]*)(?=[\s,])")  # a named context or a stage
_LOST = "failed to stat lower snapshot"  # moby/buildkit#6977
_NO_ROOM = "no space left on device"


@dataclass(frozen=True)
class Export:
    """An OCI layout that receives a build's image instead of the engine; blobs that it has already are not sent again.

    It holds an index: the image's manifest and BuildKit's provenance, whose subject is `name`. `compression` (zstd) is
    that of all its layers; empty keeps theirs. `annotations` are put on the index and on the image's manifest.
    """

    layout: Path
    name: str
    annotations: Mapping[str, str]
    compression: str = ""

    def words(self) -> list[str]:
        """The options of `docker buildx build`."""
        output = f"type=oci,tar=false,dest={self.layout},name={self.name}"
        if self.compression:
            output += f",compression={self.compression},force-compression=true,oci-mediatypes=true"
        # A BuildKit that does not know SLSA 1 writes 0.2 (seen: 0.13).
        words = ["--provenance=mode=max,version=v1", "--output", output]
        for name, value in sorted(self.annotations.items()):
            for where in ("index", "manifest"):  # buildx 0.13 takes one place an option
                words += ["--annotation", f"{where}:{name}={value}"]
        return words


@dataclass(frozen=True)
class Recipe:
    """How images are built on a base: the Dockerfile, its named contexts (name to folder) and ARGs.

    `wheels` is one digest over the wheels, empty where the base brings its own software.
    """

    dockerfile: bytes
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str]
    wheels: str = ""


@dataclass(frozen=True)
class Build:
    """One build: a target of a Dockerfile, its named contexts (name to folder), ARGs and labels.

    `export` is an OCI layout that receives the image; else the engine gets it, under the name `tag`.
    """

    dockerfile: bytes
    target: str
    contexts: Mapping[str, Path]
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    export: Export | None = None


@dataclass(frozen=True)
class Built:
    """What BuildKit says of an image: the digest of its config, and the id by which the engine knows it.

    Of an image that was exported: no config digest, and the digest of its index.
    """

    config_digest: str
    image_id: str


def command(session: Session, wanted: Build, metadata: Path | None = None) -> list[str]:
    """The whole command line of a build, sorted so that it is the same every time."""
    text, contexts = pin_contexts(wanted.dockerfile, wanted.contexts)
    folder = session.home / "contexts"
    file = folder / f"Dockerfile-{sha256_bytes(text)[:24]}"
    write_whole(file, text)
    words = ["docker", "buildx", "build", "--progress=plain", "--network=none"]
    words += ["--provenance=false"] if wanted.export is None else wanted.export.words()
    words += ["--file", str(file), "--target", wanted.target]
    for name, place in sorted(contexts.items()):
        words += ["--build-context", f"{name}={place}"]
    for name, value in sorted(wanted.arguments.items()):
        words += ["--build-arg", f"{name}={value}"]
    for name, value in sorted(wanted.labels.items()):
        words += ["--label", f"{name}={value}"]
    words += ["--tag", wanted.tag] if wanted.tag else ()
    words += ["--metadata-file", str(metadata)] if metadata is not None else ()
    return [*words, str(Staging(session.home).empty())]


def build(session: Session, wanted: Build) -> Built:
    """Build one target. Raise `BuildError`, or `DockerError`."""
    said: deque[str] = deque(maxlen=20)

    def heard(line: str) -> None:
        match = _STEP_LINE.match(line)
        if match:
            said.append(match.group(1))

    with tempfile.TemporaryDirectory(dir=session.home / "contexts", prefix=".buildx-") as temporary:
        metadata = Path(temporary) / "metadata.json"
        words = command(session, wanted, metadata)
        try:
            run(words, env=session.engine.environment(), log=session.log, on_line=heard)
        except ProcessFailed as error:
            raise _failed(session, wanted.target, tuple(said), error) from error
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
            hint="check `pipeline daemon status`, then run the same command again: it resumes",
            log=str(session.log),
        )
    if any(_LOST in line for line in error.details):
        return BuildError(
            f"target {target} did not build: BuildKit has lost a snapshot of the base (moby/buildkit#6977)",
            details=error.details,
            hint="`docker buildx prune --all --force` empties its cache; then run the same command again",
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


def pin_contexts(dockerfile: bytes, contexts: Mapping[str, Path]) -> tuple[bytes, dict[str, Path]]:
    """The Dockerfile and its contexts under names of their content: `plan` becomes `plan-<12 digits>`.

    BuildKit keeps what it received for a local context and, at the next build, receives only what changed into the same
    folder. A directory in which something changed then carries the time of that moment, whatever time was sent (seen:
    Engine 26.1.5), and the layer differs. A context that has another name for other content is received anew.
    """
    names = {name: f"{name}-{stat_digest(place)[:12]}" for name, place in contexts.items()}
    text = _FROM.sub(lambda m: m[1] + names.get(m[2].decode(), m[2].decode()).encode(), dockerfile)
    return text, {names[name]: place for name, place in contexts.items() if names[name].encode() in text}


def stat_digest(place: Path) -> str:
    """Over paths, sizes, modes and times below a folder: what BuildKit itself compares."""
    return sha256_json(sorted(_rows(place)))


def _rows(place: Path) -> Iterator[list[object]]:
    for folder, names, files in os.walk(place):
        for one in (*names, *files):
            path = Path(folder) / one
            stat = path.lstat()
            yield [str(path.relative_to(place)), stat.st_mode, stat.st_size * path.is_file(), stat.st_mtime_ns]
