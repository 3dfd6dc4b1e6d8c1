"""Which FlashInfer is too old to be tuned with, whatever the strategy, and why: for who plans and for who tunes."""

from __future__ import annotations

OLDEST = (0, 6, 16)  # the first with a process group for its autotuner
_KEYS_COLLIDE_BELOW = (0, 6, 13)
REMEDY = f"use {'.'.join(map(str, OLDEST))} or newer in versions.json"


def too_old(version: str, release: tuple[int, ...]) -> str:
    """The refusal of a version with its reason, in one line; empty for one that can be tuned with.

    `release` holds the numbers of `version`: 0.6.16.post3 is (0, 6, 16).
    """
    if release >= OLDEST:
        return ""
    why = "it has no process group for the autotuner, so ranks would choose differently"
    if release < _KEYS_COLLIDE_BELOW:
        why += "; and its cache keys collide, so that a tactic can be chosen that crashes another shape"
    return f"FlashInfer {version} is refused: {why}"
