"""A client of the engine for the length of a block, and its own errors said in our words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.contract.errors import DockerError

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine


class EngineGone(DockerError):
    """The engine stopped answering, or refused a request that it should take."""


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Errors of the SDK that no step foresaw become `EngineGone`."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        said = str(getattr(error, "explanation", "") or error).strip().splitlines()
        raise EngineGone(
            f"the engine at {engine.host} failed: {said[-1][:300] if said else type(error).__name__}",
            hint="`pipeline daemon status` tells whether it still answers, and where its log is",
        ) from error


@contextmanager
def connected(engine: Engine) -> Iterator[DockerClient]:
    """Connect, and close on the way out; errors are `translated`."""
    from pipeline.daemon import connect

    with contextlib.closing(connect(engine)) as client, translated(engine):
        yield client
