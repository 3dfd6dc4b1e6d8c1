"""Where caches are, in one spelling for every command.

./caches, /a/b.json, ~/c     a path: it exists, or it cannot be an image's name
oci://HOST/REPO[:TAG][@D]    caches in a registry
tuned/tiny:1                 an image in the Docker Engine
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.contract.errors import CacheRefused, DockerError, UsageError
from pipeline.contract.text import without_login

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient
    from pipeline.registry.reference import Reference

SCHEME = "oci://"
METAVAR = "PATH|IMAGE|oci://…"


class TargetUnknown(UsageError):
    """What was named is no path, no image and nothing in a registry."""


class NoCacheInImage(CacheRefused):
    """An image without a tuned cache."""


@dataclass(frozen=True)
class Location:
    """A place that a user named."""

    kind: Literal["path", "image", "registry"]
    text: str

    @property
    def path(self) -> Path:
        """The path of a location of that kind."""
        return Path(self.text)


def locate(text: str) -> Location:
    """Tell what a text names. Raises `TargetUnknown` for what can be none of the three."""
    if not text:
        raise TargetUnknown(
            "no path, image or registry was named", hint="caches/h200, tuned/tiny:1, oci://HOST/REPO:TAG"
        )
    if text.startswith(SCHEME):
        return Location("registry", text)
    if "://" in text:
        raise TargetUnknown(f"{without_login(text)!r}: only {SCHEME} is known", hint="oci://HOST/REPO:TAG")
    try:
        is_path = text.startswith(("/", ".", "~")) or text.endswith(".json") or os.path.lexists(text)
    except ValueError:
        is_path = True
    return Location("path" if is_path else "image", text)


def reference(text: str) -> Reference:
    """The registry's side of a command. Raises `UsageError`."""
    from pipeline.registry.reference import Reference

    if text == SCHEME or not text.startswith(SCHEME):
        what = "missing registry reference" if text in ("", SCHEME) else f"{text!r} does not begin with {SCHEME}"
        raise TargetUnknown(what, hint="oci://registry.example.com/caches:tag (make: OCI=…)")
    return Reference.in_registry(text.removeprefix(SCHEME))


@contextlib.contextmanager
def opened(text: str) -> Iterator[Path]:
    """The cache root that a location names: a directory itself, of an image or a registry a copy.

    Raises `TargetUnknown`, `NoCacheInImage`, a `DockerError`, and what a registry raises.
    """
    location = locate(text)
    if location.kind == "path":
        if not location.path.is_dir():
            what = f"{text} is not a directory" if location.path.exists() else f"there is no {text}"
            hint = "a cache root, an image, or oci://HOST/REPO:TAG; cache inspect, diff and merge take cache files too"
            raise TargetUnknown(what, hint=hint)
        yield above_key(location.path.resolve())
    elif location.kind == "image":
        with image_in_engine(text) as (client, image), unpacked(client, image) as root:
            yield root
    else:
        from pipeline.registry.client import Registry
        from pipeline.release import caches, warm_ups

        source = reference(text)
        with tempfile.TemporaryDirectory(prefix="caches-") as temporary, Registry(source.registry) as registry:
            caches.pull(registry, source, Path(temporary) / "root")
            if warm_ups.is_warm_up(Path(temporary) / "root"):
                raise CacheRefused(
                    f"{text} is a server's warm-up, no cache of the tuner", hint="`pipeline cache pull`, then CACHE="
                )
            yield Path(temporary) / "root"


def above_key(directory: Path) -> Path:
    """The cache root that a key's own directory lies in; any other directory is taken as a root itself."""
    from pipeline.contract.places import CACHE_FILE
    from pipeline.contract.record import Key

    if os.path.lexists(directory / CACHE_FILE):
        with contextlib.suppress(CacheRefused):
            Key.parse("/".join(directory.parts[-3:]))
            return directory.parents[2]
    return directory


@contextlib.contextmanager
def image_in_engine(name: str) -> Iterator[tuple[DockerClient, Image]]:
    """The engine's client and an image of it; no engine is started for this.

    Raises `TargetUnknown` for what no image can be called, and when an engine answers and has no such image; an
    `DockerError` when none answers.
    """
    from pipeline.daemon import connect, find
    from pipeline.image.names import check_reference

    try:
        check_reference(name)  # before an engine is looked for: the answer must not depend on whether one runs
    except UsageError as error:
        raise TargetUnknown(
            f"{without_login(name)!r}: no such path, nor a valid image reference", hint=error.hint
        ) from error
    engine = find()
    if engine is None:
        raise DockerError(
            f"{name}: no such path, and no Docker Engine answers that might have such an image",
            hint="give a path that exists, or run `pipeline daemon up`",
        )
    from docker.errors import APIError, ImageNotFound

    with contextlib.closing(connect(engine)) as client:
        try:
            image = client.images.get(name)
        except (ImageNotFound, APIError) as error:  # the engine answers 400 to what cannot be a name at all
            raise TargetUnknown(
                f"{name}: no such path, and no such image at {engine.host}",
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
    from pipeline.image.containers import ContainerSpec, created

    root = cache_root_of(image)
    with tempfile.TemporaryDirectory(prefix="caches-") as temporary:
        place = Path(temporary) / "root"
        with created(client, str(image.id), ["true"], ContainerSpec()) as container:
            try:
                chunks, _ = container.get_archive(root)
            except NotFound as error:
                raise NoCacheInImage(f"the image has no {root}", hint="build one with `make image MODEL=…`") from error
            safe_extract(chunks, place, strip=1)
        yield place
