"""Names and labels of images, and the step `tag`: a name for a verified image, taken from nobody."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.errors import UsageError
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import CODE_ROOT

if TYPE_CHECKING:
    from docker import DockerClient

PREFIX = "io.github.tuned-image-pipeline"
KEY = f"{PREFIX}.key"  # FlashInfer's keys that were baked with this image, by commas
MODULES = f"{PREFIX}.modules"  # names of FlashInfer's compiled modules in the layer below the caches
INPUTS = f"{PREFIX}.warm-up"  # the inputs digest: an image with this label is ours
PRODUCER = f"{PREFIX}.producer"  # tune, vllm or sglang
ENVIRONMENT = f"{PREFIX}.environment"  # the static variables by which a reader finds the caches without our entry point
ENTRYPOINT = f"{PREFIX}.entrypoint"  # what an override of the command loses
TUNERS = "tuned-image-pipeline/tuner"  # tuner images
PIPELINE_RUN = f"{CODE_ROOT}/bin/pipeline-run"

# Docker's grammar: a first part counts as a registry only when it has a dot or a port, or is localhost.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:\d))(?::\d+)?"
_NAME = re.compile(rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?")


def check_image_name(name: str) -> None:
    """Raise `UsageError` unless `name` is empty or `[registry/]path[:tag]`."""
    if name and not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name an image", hint="such as registry.example/team/model:tag, lower case")


def check_reference(name: str) -> None:
    """Raise `UsageError` unless `name` can name an image that exists: a name, an id, or a name with a digest."""
    if not name.strip():
        raise UsageError("no image was named", hint="`docker images tuned/*` lists those that are here")
    if not re.fullmatch(r"(sha256:)?[0-9a-f]{6,64}", name):
        check_image_name(re.sub(r"@sha256:[0-9a-f]{64}$", "", name))


def own_labels(config: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of an image of this pipeline that still starts as one; none of any other."""
    return config.get("Labels") or {} if (config.get("Entrypoint") or [""])[0] == PIPELINE_RUN else {}


def split(name: str) -> tuple[str, str]:
    """Repository and tag of an image name; `latest` where it has no tag."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def plain(text: str, most: int = 60) -> str:
    """`text` in the characters that a tag may have, at most `most` of them."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c == ".") else "-" for c in text.lower())
    parts = [".".join(piece for piece in part.split(".") if piece) for part in kept.split("-")]
    return "-".join(part for part in parts if part)[:most].strip(".-") or "x"


def usual_name(model: str, ranks: int, device: str, version: str, inputs: str) -> str:
    """`tuned/<model>:tp<N>-<device>-<version>-<first 8 of the inputs digest>`: another base gives another name."""
    return f"tuned/{plain(model)}:tp{ranks}-{plain(device)}-{plain(version)}-{inputs[:8]}"


def gpu_of(manifests: Sequence[Manifest]) -> str:
    """What the keys were tuned on: the GPUs' names without the vendor's, or `cpu-<machine>`."""
    found = [m.record.host.gpus[0].removeprefix("NVIDIA ") if m.record.host.gpus else m.record.arch for m in manifests]
    return "-".join(dict.fromkeys(found))


def check_free(client: DockerClient, repository: str, tag: str) -> str:
    """The id of our own image that has this name, empty where nobody has; raise `UsageError` where another has it."""
    from docker.errors import ImageNotFound

    name = f"{repository}:{tag}"
    try:
        image = client.images.get(name)
    except ImageNotFound:
        return ""
    if INPUTS not in image.labels and KEY not in image.labels:
        raise UsageError(
            f"{name} is the name of another image, which this pipeline did not make",
            hint=f"choose another IMAGE= (--image), or free the name: docker rmi {name}",
        )
    return str(image.id)


def tag(client: DockerClient, image: str, repository: str, name: str) -> str:
    """Give an image its name. An image of this pipeline that had it is removed where nothing else names or uses it."""
    from docker.errors import ImageNotFound

    from .session import drop_image

    before = check_free(client, repository, name)
    client.images.get(image).tag(repository, name)
    if before and before != str(client.images.get(image).id):
        log.note(f"{repository}:{name} moved to this image, from {before[:19]}…")
        with contextlib.suppress(ImageNotFound):
            if not client.images.get(before).tags:  # by its id the engine would also remove the only other name
                drop_image(client, before)
    return f"{repository}:{name}"
