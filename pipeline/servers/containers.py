"""Starts in a container of a Docker Engine: no network, our code in a nameless volume, the results out of it.

What is needed goes in and out through the engine's archive calls, so that the engine may be on another machine and the
container's own root may be read-only.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import secrets
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import TYPE_CHECKING, Any

from pipeline.contract.errors import DockerError, UsageError, WarmUpError

from . import kinds
from .collect import PACK
from .starts import Spec, Start

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

INSIDE = "/pipeline-start"
_OUT = "out"
_PACKAGE = Path(__file__).resolve().parent.parent
_CODE = ("__init__.py", "run.py", "log.py", "contract/*.py", "servers/__init__.py", "servers/watch.py",
         "servers/starts.py", "servers/kinds.py", "servers/collect.py")  # fmt: skip
_START = re.compile(r"\s*start (\d+): ")  # begins, or is ready
_SLACK = 300.0  # seconds beside the server's own: looking at the file system, packing
_SHARED_MEMORY = 8 << 30
_LABEL = "tuned-image-pipeline"


@dataclass(frozen=True)
class How:
    """How a container is made: `user` as Docker spells it; `read_only` with a writable copy of the caches' root, as
    `docker run --read-only -v ROOT --tmpfs /tmp` gives; `empty` with nothing at that root.
    """

    user: str = "0:0"
    read_only: bool = False
    empty: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"as {self.user}", *(["read-only"] if self.read_only else []), *(["empty"] if self.empty else [])]
        return ", ".join(said)


@dataclass(frozen=True)
class Watched:
    """What became of the starts; `pack` holds what they wrote, where that was asked for."""

    starts: tuple[Start, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    pack: Path | None


def watch(
    client: DockerClient, image: str, spec: Spec, model: Mapping[str, str], how: How, *, out: Path, logfile: Path
) -> Watched:
    """Start a server in a container of `image`. `model` is absolute path → text; results go to the folder `out`.

    Raises `WarmUpError` where the container itself fails; what became of the server is in the result.
    """
    from docker.errors import APIError

    out.mkdir(parents=True, exist_ok=True)
    with _created(client, image, model, how) as container:
        container.put_archive(INSIDE, _archive({**_code(), "spec.json": json.dumps(asdict(spec))}, folders=(_OUT,)))
        for place, files in _volumes(model).items():
            container.put_archive(place, _archive(files))
        try:
            container.start()
        except APIError as error:
            raise WarmUpError(
                f"the container does not start: {str(error.explanation).strip()[:300]}",
                hint="the image needs python3 on its PATH, and the GPUs must be free to use",
            ) from error
        status = _finish(container, spec, logfile)
        if status != 0:
            said = container.logs(tail=20).decode(errors="replace").splitlines()
            raise WarmUpError(
                f"the starts could not be watched: exit code {status}", details=said, log=str(logfile),
                hint="137 is a lack of memory; a full disk says so above",
            )  # fmt: skip
        _fetch(container, out)
    return read(out)


def read(out: Path) -> Watched:
    """The result in a folder. Raises `UsageError` where the server is not in the image."""
    value = json.loads((out / "result.json").read_text(encoding="utf-8"))
    if "missing" in value:
        raise UsageError(
            f"the server is not in this image: {value['missing']}", hint="BASE_IMAGE must be one that serves"
        )
    starts = tuple(Start.read(one) for one in value["starts"])
    pack = out / PACK
    return Watched(starts, value["facts"], tuple(value["notes"]), pack if pack.is_file() else None)


@contextlib.contextmanager
def _created(client: DockerClient, image: str, model: Mapping[str, str], how: How) -> Iterator[Container]:
    from docker.errors import NotFound

    name = f"{_LABEL}-{secrets.token_hex(8)}"  # by us and beforehand, so that an interrupt leaves nothing behind
    options: dict[str, Any] = {
        "network_mode": "none",
        "user": how.user,
        "working_dir": "/",
        "shm_size": _SHARED_MEMORY,
        "labels": {_LABEL: "running"},
        "volumes": [INSIDE, *_volumes(model)],
        **how.options,
    }
    tmpfs = {}
    if how.read_only:
        options["read_only"] = True
        tmpfs["/tmp"] = "rw,mode=1777"  # noqa: S108 - inside the container
        if not how.empty:
            options["volumes"].append(kinds.ROOT)
    if how.empty:
        tmpfs[kinds.ROOT] = "rw,exec,mode=1777"
    files = (PurePosixPath(INSIDE, *parts) for parts in (("pipeline", "servers", "watch.py"), ("spec.json",)))
    command = ["python3", "-I", *map(str, files), str(PurePosixPath(INSIDE, _OUT, "result.json"))]
    try:
        yield client.containers.create(image, command, name=name, entrypoint=[], tmpfs=tmpfs, **options)
    finally:
        with contextlib.suppress(NotFound):
            client.api.remove_container(name, force=True, v=True)


def _volumes(model: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Where the model's files go: one volume at the folder that holds all of them."""
    if not model:
        return {}
    top = Path(next(iter(model))).parent
    while not all(Path(path).is_relative_to(top) for path in model):
        top = top.parent
    return {str(top): {str(Path(path).relative_to(top)): text for path, text in model.items()}}


def _code() -> dict[str, str]:
    found = {}
    for pattern in _CODE:
        for path in sorted(_PACKAGE.glob(pattern)):
            found[f"pipeline/{path.relative_to(_PACKAGE)}"] = path.read_text(encoding="utf-8")
    return found


def _archive(files: Mapping[str, str], folders: Sequence[str] = ()) -> bytes:
    """A tar stream that any user can read; `folders` are such that any user can write there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as stream:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            stream.addfile(entry)
        for folder in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            stream.addfile(entry)
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            data = text.encode()
            entry.size, entry.mode = len(data), 0o644
            stream.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _finish(container: Container, spec: Spec, logfile: Path) -> int:
    from requests.exceptions import ConnectionError as Disconnected
    from requests.exceptions import ReadTimeout

    logfile.parent.mkdir(parents=True, exist_ok=True)
    most = spec.most * (spec.ready + spec.answer * max(1, len(spec.requests))) + _SLACK
    with logfile.open("a", encoding="utf-8") as sink:
        follower = Thread(target=_follow, args=(container, sink.write, spec.most), daemon=True)
        follower.start()
        try:
            return int(container.wait(timeout=most)["StatusCode"])
        except (ReadTimeout, Disconnected) as error:
            said = container.logs(tail=20).decode(errors="replace").splitlines()
            raise WarmUpError(f"the starts did not end within {most:.0f} s", details=said, log=str(logfile)) from error
        finally:
            follower.join(10.0)


def _follow(container: Container, write: Callable[[str], object], most: int) -> None:
    from pipeline import log

    pending = ""
    for chunk in container.logs(stream=True, follow=True):
        *lines, pending = (pending + chunk.decode(errors="replace")).split("\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # the log was closed: the container outlived its bound
                write(line + "\n")
            log.line(line)
            start = _START.match(line)
            log.progress(line.strip(), *((int(start[1]) - ("ready" not in line), most) if start else ()))


def _fetch(container: Container, out: Path) -> None:
    """Bring what lies in the container's result folder."""
    partial = out / ".fetched.tar"
    chunks, _ = container.get_archive(str(PurePosixPath(INSIDE, _OUT)))
    with partial.open("wb") as sink:
        for chunk in chunks:
            sink.write(chunk)
    with tarfile.open(partial) as stream:
        for member in stream:
            name = Path(member.name).name
            source = stream.extractfile(member) if member.isreg() else None
            if source is not None:
                with source, (out / name).open("wb") as sink:
                    while data := source.read(1 << 20):
                        sink.write(data)
    partial.unlink()
    if not (out / "result.json").is_file():
        raise DockerError("the container left no result", hint="its disk may be full")
