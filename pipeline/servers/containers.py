"""Starts in a container of a Docker Engine: no network, our code in a nameless volume, the results out of it.

What is needed goes in and out through the engine's archive calls, so that the engine may be on another machine and the
container's own root may be read-only.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.cache.archive import safe_extract
from pipeline.contract.errors import CacheRefused, DockerError, WarmUpError
from pipeline.image.containers import ContainerSpec, ContainerTimeout, created, follow, run_one, tar_of

from . import kinds
from .adapters import adapter_of
from .collect import PACK
from .manifest import FILE, ServerManifest
from .starts import Start
from .watch import Order
from .words import Words

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient
    from pipeline.image.gpus import Gpus

INSIDE = "/pipeline-start"
_OUT = "out"
_RESULT = "result.json"
_PACKAGE = Path(__file__).resolve().parent.parent
_CODE = ("__init__.py", "run.py", "log.py", "contract/*.py", "servers/__init__.py", "servers/watch.py",
         "servers/starts.py", "servers/kinds.py", "servers/collect.py")  # fmt: skip
_START = re.compile(r"\s*start (\d+): ")  # begins, or is ready
_LIMIT = 1 << 37  # bytes of what starts wrote
_SLACK = 300.0  # seconds beside the server's own: looking at the file system, packing


@dataclass(frozen=True)
class How(ContainerSpec):
    """How a container is made: read-only with a writable copy of the caches' root, as `docker run --read-only -v ROOT
    --tmpfs /tmp` gives; `empty` with nothing at that root.
    """

    shm_size: int = 8 << 30
    empty: bool = False

    def options(self) -> dict[str, Any]:
        """The docker SDK's arguments. A server has what `docker run` gives it, no less."""
        chosen = super().options()
        del chosen["cap_drop"], chosen["security_opt"]
        chosen["tmpfs"] = {"/tmp": "rw,mode=1777"} if self.read_only else {}  # noqa: S108 - inside the container
        if self.empty:
            chosen["tmpfs"][kinds.ROOT] = "rw,exec,mode=1777"
        elif self.read_only:
            chosen["volumes"].append(kinds.ROOT)
        return chosen

    def __str__(self) -> str:
        said = (f"as {self.user}" if self.user else "", "read-only" * self.read_only, "empty" * self.empty)
        return ", ".join(filter(None, said))


@dataclass(frozen=True)
class Watched:
    """What became of the starts of each set of arguments; `pack` has what they wrote, where that was asked for."""

    starts: tuple[tuple[Start, ...], ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    pack: Path | None

    @staticmethod
    def read(result: Mapping[str, Any], folder: Path) -> Watched:
        """The result of `watch`. Raises `WarmUpError` where the server is not in the image."""
        if "missing" in result:
            raise WarmUpError(
                f"the server is not in this image: {result['missing']}", hint="BASE_IMAGE must be one that serves"
            )
        starts = tuple(tuple(map(Start.read, some)) for some in result["starts"])
        pack = folder / PACK
        return Watched(starts, result["facts"], tuple(result["notes"]), pack if pack.is_file() else None)


def watch(
    client: DockerClient, image: str, order: Order, model: Mapping[str, str], how: How, *, out: Path, logfile: Path
) -> Watched:
    """Start a server in a container of `image`. `model` is absolute path → text; results go to the folder `out`.

    Raises `WarmUpError` where the container itself fails; what became of the server is in the result.
    """
    from docker.errors import APIError

    out.mkdir(parents=True, exist_ok=True)
    logfile.parent.mkdir(parents=True, exist_ok=True)
    files = ("pipeline/servers/watch.py", "order.json", f"{_OUT}/{_RESULT}")
    command = ["python3", "-I", *(str(PurePosixPath(INSIDE, file)) for file in files)]
    spec = replace(how, files={INSIDE: _inside(order), **_volumes(model)})
    most = max(one.most for one in order.specs)
    timeout = sum(one.timeout for one in order.specs) + _SLACK
    with created(client, image, command, spec) as container, logfile.open("a") as sink:

        def say(line: str) -> None:
            with suppress(ValueError):  # the log was closed: the container outlived its time
                sink.write(line + "\n")
            log.note(line.strip())
            start = _START.match(line)
            log.progress(line.strip(), *((int(start[1]) - ("ready" not in line), most) if start else ()))

        try:
            status = follow(container, "the starts", timeout=timeout, on_line=say)
        except APIError as error:
            raise WarmUpError(
                f"the container does not start: {str(error.explanation).strip()[:300]}",
                hint="the image needs python3 on its PATH, and the GPUs must be free to use",
            ) from error
        except ContainerTimeout as error:
            raise WarmUpError(error.message, details=error.details, hint=error.hint, log=str(logfile)) from error
        if status != 0:
            raise WarmUpError(
                f"the starts could not be watched: exit code {status}",
                details=container.logs(tail=20).decode(errors="replace").splitlines(),
                hint="137 is a lack of memory; a full disk says so above",
                log=str(logfile),
            )
        _fetch(container, out)
    watched = Watched.read(json.loads((out / _RESULT).read_text(encoding="utf-8")), out)
    last = watched.starts[-1][-1]
    if last.outcome != "ready":  # its cause may stand far above the last lines that an error shows
        with logfile.open("a", encoding="utf-8") as sink:
            sink.writelines(f"{at:8.2f} {text}\n" for at, text in last.lines)
    return watched


def manifest_in(client: DockerClient, image: str) -> tuple[ServerManifest, str]:
    """The manifest of an image, and its text. Raises `CacheRefused` where it has none."""
    from docker.errors import NotFound

    with created(client, image, ["true"], ContainerSpec()) as container:
        try:
            chunks, _ = container.get_archive(FILE)
        except NotFound as error:
            raise CacheRefused(f"{image} was not warmed up by a server's start", hint=f"it has no {FILE}") from error
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as stream:
            source = stream.extractfile(stream.getmembers()[0])
            assert source is not None
            text = source.read().decode()
    return ServerManifest.read(text), text


def own_hashes(client: DockerClient, image: str, told: ServerManifest, now: Words, gpus: Gpus) -> list[str]:
    """The server's own hash of each set that was baked and, last, of `now`, computed in a container of the image.

    Empty where it cannot be computed here. Raises `ContainerTimeout`.
    """
    sets = [*(Words(told.server, one.arguments) for one in told.sets), now]
    command = adapter_of(told.server).hashing(sets)
    if not command or (told.device != "cpu" and not gpus.options()):
        return []
    model = {path: text for one in told.sets for path, text in one.model.items()}
    spec = ContainerSpec(environment=now.environment, gpus=gpus, files=_volumes(model))
    ended = run_one(client, image, command, spec, timeout=_SLACK)
    try:
        found = list(map(str, json.loads(ended.stdout.strip().splitlines()[-1])))
    except (ValueError, LookupError, TypeError):
        found = []
    return found if all(found) else []


def _volumes(model: Mapping[str, str]) -> dict[str, bytes]:
    """Where the model's files go: one volume at the folder that holds all of them."""
    if not model:
        return {}
    top = os.path.commonpath([PurePosixPath(path).parent for path in model])
    return {top: tar_of({}, {os.path.relpath(path, top): text.encode() for path, text in model.items()})}


def _inside(order: Order) -> bytes:
    """Our code, the order, and a folder in which any user can write."""
    paths = (path for pattern in _CODE for path in sorted(_PACKAGE.glob(pattern)))
    files = {f"pipeline/{path.relative_to(_PACKAGE)}": path.read_bytes() for path in paths}
    value = {"specs": [asdict(spec) for spec in order.specs], "facts": order.facts}
    with tempfile.TemporaryDirectory() as empty:
        Path(empty).chmod(0o777)
        return tar_of({_OUT: Path(empty)}, {**files, "order.json": json.dumps(value).encode()})


def _fetch(container: Container, out: Path) -> None:
    """Bring what lies in the container's result folder."""
    chunks, _ = container.get_archive(f"{INSIDE}/{_OUT}")
    safe_extract(chunks, out, strip=1, limit=_LIMIT)
    if not (out / _RESULT).is_file():
        raise DockerError("the container left no result", hint="its disk may be full")
