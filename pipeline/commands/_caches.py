"""Where the commands `explain` and `cache` find caches: a file, a directory, or an image in the engine."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.errors import CacheRefused, DockerError, UsageError

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient
    from pipeline.cache.environment import Environment
    from pipeline.contract.record import Record

_NAMES = ("autotune_config", "rank_")  # how FlashInfer, vLLM and SGLang name their files
_MOST = 10_000


class TargetUnknown(UsageError):
    """What was named is no file, no directory and no image."""


class RecordUnread(CacheRefused):
    """The environment record of an image could not be read in a container of it."""


@contextlib.contextmanager
def image_in_engine(name: str) -> Iterator[tuple[DockerClient, Image]]:
    """The engine's client and an image of it; no engine is started for this.

    Raises `TargetUnknown` for what no image can be called, and when an engine answers and has no such image; an
    `DockerError` when none answers.
    """
    from pipeline.daemon import connect, find
    from pipeline.image.settings import ImageNameInvalid, check_reference

    try:
        check_reference(name)  # before an engine is looked for: the answer must not depend on whether one runs
    except ImageNameInvalid as error:
        raise TargetUnknown(
            f"{name!r} is no file, no directory, and no image in the engine can have that name", hint=error.hint
        ) from error
    engine = find()
    if engine is None:
        raise DockerError(
            f"{name} is no file or directory, and no Docker Engine answers that might have an image of that name",
            hint="give a path that exists, or `pipeline daemon up`",
        )
    from docker.errors import APIError, ImageNotFound

    with contextlib.closing(connect(engine)) as client:
        try:
            image = client.images.get(name)
        except (ImageNotFound, APIError) as error:  # the engine answers 400 to what cannot be a name at all
            raise TargetUnknown(
                f"{name} is no file, no directory, and no image in the engine at {engine.host}",
                hint="`docker images` lists what there is",
            ) from error
        yield client, image


def cache_root_of(image: Image) -> str:
    """Where an image keeps its caches: what its environment says, else the default."""
    from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR

    given = dict(line.partition("=")[::2] for line in image.attrs.get("Config", {}).get("Env") or ())
    return str(given.get(ENV_CACHE_DIR) or CACHE_ROOT)


@contextlib.contextmanager
def unpacked(client: DockerClient, image: Image) -> Iterator[Path]:
    """The cache root of an image as a directory here, read from a container that was created and never started.

    Raises `NoCacheInImage` when it has none, `ArchiveRefused` when it must not be unpacked.
    """
    from docker.errors import NotFound

    from pipeline.cache.archive import safe_extract
    from pipeline.image.contain import Sandbox, created

    root = cache_root_of(image)
    with tempfile.TemporaryDirectory(prefix="caches-") as temporary:
        place = Path(temporary) / "root"
        with created(client, str(image.id), ["true"], Sandbox()) as container:
            try:
                chunks, _ = container.get_archive(root)
            except NotFound as error:
                raise NoCacheInImage(f"the image has no {root}", hint="build one with `make image MODEL=…`") from error
            safe_extract(chunks, place, strip=1)
        yield place


class NoCacheInImage(CacheRefused):
    """An image without a tuned cache."""


def live_record(client: DockerClient, image: Image, *, gpus: bool, max_wait: float) -> Record:
    """Read the whole record in a started container of the image, with all GPUs where `gpus`.

    Raises `RecordUnread` with the last lines of what it said, or `ContainerTooSlow`.
    """
    from docker.errors import APIError

    from pipeline.contract.places import ENV_WORKSPACE
    from pipeline.contract.record import Record
    from pipeline.daemon import find
    from pipeline.image.contain import Sandbox, run_to_end
    from pipeline.image.gpus import NO_GPUS, offered

    engine = find()
    sandbox = Sandbox(
        environment={ENV_WORKSPACE: "/tmp/workspace"},  # noqa: S108 - in the container
        gpus=offered(engine) if gpus and engine is not None else NO_GPUS,
    )
    command = ["python3", "-m", "pipeline.tune.record"]
    try:
        ended = run_to_end(client, str(image.id), command, sandbox, max_wait=max_wait)
    except APIError as error:  # no python3 in it, or no GPU for it
        raise RecordUnread(f"the container did not start: {error.explanation or error}") from error
    try:
        return Record.from_json(json.loads(ended.stdout.strip().splitlines()[-1])["record"])
    except (LookupError, ValueError, TypeError, CacheRefused) as error:
        raise RecordUnread(
            f"the record could not be read in the container (exit code {ended.status})",
            details=ended.stderr,
            hint="the image must carry /opt/pipeline, torch and FlashInfer",
        ) from error


def here() -> Environment:
    """As much of this host's environment as is known without torch: the processor, and the GPU's name by NVML."""
    from pipeline.cache.environment import Environment
    from pipeline.start.check import read_cpu
    from pipeline.start.nvml import NoNvml, read_gpus, visible

    try:
        names = [device.name for device in visible(read_gpus(), os.environ)]
        said = f"compared with this host's {names[0]}" if names else "no GPU is visible here"
    except NoNvml as error:
        names, said = [], f"no GPU here ({error}), so that only its processor was looked at"
    record = {"gpu": names[0]} if names else {}
    return Environment(record, cpu=read_cpu(), complete=False, source=said)


@contextlib.contextmanager
def root_of(target: str) -> Iterator[Path]:
    """The cache root that `target` names: a directory, or for `oci:DIR[:TAG]` and an image a copy.

    Raises `TargetUnknown`, `LayoutInvalid`, `NoCacheInImage` or an `DockerError`.
    """
    from pipeline.cache.oci import read_layout

    if target.startswith("oci:"):
        layout, tag = split_oci(target)
        with tempfile.TemporaryDirectory(prefix="caches-") as temporary:
            read_layout(layout, tag, Path(temporary) / "root")
            yield Path(temporary) / "root"
    elif looks_like_path(target):
        if not Path(target).is_dir():
            raise TargetUnknown(f"{target} is not a directory", hint="give a cache root, an image, or oci:DIR")
        yield above_key(Path(target).resolve())
    else:
        with image_in_engine(target) as (client, image), unpacked(client, image) as root:
            yield root


def above_key(directory: Path) -> Path:
    """The cache root that a key's own directory lies in; any other directory is taken as a root itself."""
    from pipeline.contract.key import Key
    from pipeline.contract.places import CACHE_FILE

    if os.path.lexists(directory / CACHE_FILE):
        with contextlib.suppress(CacheRefused):
            Key.parse("/".join(directory.parts[-3:]))
            return directory.parents[2]
    return directory


def split_oci(target: str) -> tuple[Path, str]:
    """`oci:DIR[:TAG]` in its parts; the tag is empty where none is given."""
    path, colon, tag = target.removeprefix("oci:").rpartition(":")
    if not colon or "/" in tag:
        path, tag = target.removeprefix("oci:"), ""
    if not path:
        raise TargetUnknown(f"{target!r} names no directory", hint="oci:DIR or oci:DIR:TAG")
    return Path(path), tag


def looks_like_path(target: str) -> bool:
    """Whether a target is a path: it exists, or it cannot be an image's name."""
    if not target:
        raise TargetUnknown("no file, directory or image was named", hint="give a path or an image's name")
    if target.startswith(("/", ".", "~")) or target.endswith(".json"):
        return True
    try:
        return os.path.lexists(target)
    except ValueError:
        return True


def loose_files(directory: Path) -> list[Path]:
    """Files below a directory that are named like caches, for layouts that are not ours; links are not followed."""
    found: list[Path] = []
    for folder, names, files in os.walk(directory, followlinks=False):
        names.sort()
        found += [Path(folder) / f for f in sorted(files) if f.startswith(_NAMES) and f.endswith(".json")]
        if len(found) > _MOST:
            raise TargetUnknown(f"{directory} holds more than {_MOST} cache files", hint="name one of its directories")
    return found
