"""The step `tag`: a name for a verified image, taken from nobody."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.errors import UsageError

from .names import INPUTS, KEY
from .session import drop_image

if TYPE_CHECKING:
    from docker import DockerClient


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
    """Give an image its name. One of ours that had it is removed where nothing else names or uses it."""
    from docker.errors import ImageNotFound

    before = check_free(client, repository, name)
    client.images.get(image).tag(repository, name)
    if before and before != str(client.images.get(image).id):
        log.note(f"{repository}:{name} was {before[:19]}… until now")
        with contextlib.suppress(ImageNotFound):
            if not client.images.get(before).tags:  # by its id the engine would also remove the only other name
                drop_image(client, before)
    return f"{repository}:{name}"
