"""The exit codes of `pipeline`; docs and tests read this table."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """One code per kind of outcome, so that a CI job can branch on it."""

    OK = 0
    BUG = 1
    USAGE = 2
    DRIFT = 3
    NO_ENGINE = 4
    BUILD = 5
    TUNING = 6
    CACHE = 7
    PUBLISH = 8
    INTERRUPTED = 130


MEANING: dict[Exit, str] = {
    Exit.OK: "fine",
    Exit.BUG: "a bug of ours",
    Exit.USAGE: "usage or configuration",
    Exit.DRIFT: "drift or difference found (check, audit, cache diff)",
    Exit.NO_ENGINE: "no Docker Engine",
    Exit.BUILD: "build failed",
    Exit.TUNING: "tuning failed",
    Exit.CACHE: "cache refused",
    Exit.PUBLISH: "publishing failed",
    Exit.INTERRUPTED: "interrupted",
}
