"""The exit codes of `pipeline`; docs and tests read this table."""

from __future__ import annotations

from enum import IntEnum


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
