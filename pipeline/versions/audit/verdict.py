"""What an audit says of one name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .places import Place


class Confidence(IntEnum):
    """How sure it is that two values should be one."""

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


@dataclass(frozen=True)
class Disagreement:
    """One name with different values; `values` holds each with its places, the most frequent first."""

    name: str
    confidence: Confidence
    why: str
    values: tuple[tuple[str, tuple[Place, ...]], ...]
