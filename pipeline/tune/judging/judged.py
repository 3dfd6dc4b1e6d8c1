"""What judging found about one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Judged:
    """Times in milliseconds at the bucket; `ratio` chosen over default, over all token counts that were timed.

    `argmin` is what FlashInfer had chosen, `rounds` how many rounds decided, `clear` whether they did before the
    budget was spent.
    """

    time_ms: float | None
    default_ms: float | None
    ratio: float | None
    spread: float | None
    decided_by: str
    candidates: int
    failed: int
    rounds: int = 0
    clear: bool = True
    argmin: tuple[str, Any] | None = None
    note: str = ""
