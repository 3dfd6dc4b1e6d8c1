"""Exit codes, and the root of every error that a user may see.

A room subclasses one of the families below, once per cause, beside the code that raises it; the message says
what is wrong, the hint says what to type. Only `pipeline.__main__` and the `__main__` modules of the image
turn them into exit codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar

from .text import without_login


class Exit(IntEnum):
    """One code per kind of outcome, so that a CI job can branch on it."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DRIFT = 3
    NO_DOCKER = 4
    BUILD = 5
    WARM_UP = 6
    CACHE = 7
    PUBLISH = 8
    INTERRUPTED = 130


MEANING: dict[Exit, str] = {
    Exit.OK: "fine",
    Exit.INTERNAL: "internal error",
    Exit.USAGE: "usage or configuration",
    Exit.DRIFT: "drift or difference found",
    Exit.NO_DOCKER: "no Docker Engine",
    Exit.BUILD: "build failed",
    Exit.WARM_UP: "warm-up or tuning failed",
    Exit.CACHE: "cache refused",
    Exit.PUBLISH: "publishing failed",
    Exit.INTERRUPTED: "interrupted",
}


class PipelineError(Exception):
    """An expected failure: one clear line, a hint, an exit code, no traceback.

    `details` are further lines (the last output of a process, each of several findings); `log` is the path of
    the full log where one exists. A login in an address is left out of all of them.
    """

    exit_code: ClassVar[Exit] = Exit.INTERNAL

    def __init__(self, message: str, *, hint: str = "", details: Sequence[str] = (), log: str = "") -> None:
        self.message = without_login(message)
        super().__init__(self.message)
        self.hint = without_login(hint)
        self.details = tuple(map(without_login, details))
        self.log = log


class UsageError(PipelineError):
    """An argument, a file or a setting is wrong; nothing was started."""

    exit_code = Exit.USAGE


class DriftError(PipelineError):
    """Files that must agree do not."""

    exit_code = Exit.DRIFT


class DockerError(PipelineError):
    """No usable Docker Engine."""

    exit_code = Exit.NO_DOCKER


class BuildError(PipelineError):
    """An image could not be built."""

    exit_code = Exit.BUILD


class WarmUpError(PipelineError):
    """Tuning failed, hung, or would have ended with a partial result."""

    exit_code = Exit.WARM_UP


class CacheRefused(PipelineError):
    """A cache must not be baked or used; every reason is among the details."""

    exit_code = Exit.CACHE


class PublishError(PipelineError):
    """A push, attestation or signature failed."""

    exit_code = Exit.PUBLISH
