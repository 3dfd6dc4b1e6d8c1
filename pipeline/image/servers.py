"""Where `--server` gets its producer: pipeline/servers, for a base that has the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.errors import UsageError

from .base import Base
from .producer import Producer
from .request import Request

if TYPE_CHECKING:
    from docker import DockerClient

_IMAGES = {"vllm": "vllm/vllm-openai:<version>", "sglang": "lmsysorg/sglang:<version>"}


def check_words(server: str, arguments: str, environment: str, model: str, root: Path) -> None:
    """Raise `UsageError` for arguments, variables or a model that no base could serve: before anything is started."""
    from pipeline.servers import words
    from pipeline.servers.model import config_files

    words.parse(server, arguments, environment)
    config_files(model, root / "pipeline" / "models")


def make(request: Request, base: Base, packages: Mapping[str, str]) -> Producer:
    """The producer of a request with a server; `packages` are the versions that the base has. Raises `UsageError`."""
    from pipeline.servers import words
    from pipeline.servers.model import config_files, short_name
    from pipeline.servers.producer import ServerProducer

    if not packages.get(request.server):
        raise UsageError(
            f"{base.reference} has no {request.server}",
            hint=f"BASE_IMAGE={_IMAGES[request.server]}: the image that will serve",
        )
    said = words.parse(request.server, request.server_args, request.server_env)
    files = config_files(request.model, request.root / "pipeline" / "models")
    return ServerProducer(said, files, short_name(request.model), request.device or "cuda")


def prover(client: DockerClient, image: str) -> Producer:
    """The producer that proves an image which a server warmed up."""
    from pipeline.servers.producer import producer_of

    return producer_of(client, image)
