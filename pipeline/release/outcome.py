"""What came of a release: a row for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.contract.exits import Exit

Status = Literal["pushed", "skipped", "failed", "would push", "interrupted"]


@dataclass(frozen=True)
class Row:
    """One cell. `why` says why it was skipped or failed; `code` is the exit code of a failure."""

    cell: str
    status: Status
    image: str = ""  # registry/repository:tag
    digest: str = ""
    config_digest: str = ""
    moved: tuple[str, ...] = ()  # moving tags that stand for it now
    why: str = ""
    hint: str = ""
    code: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Summary:
    """All rows, in the order of the matrix."""

    registry: str
    rows: tuple[Row, ...] = field(default=())

    def count(self, status: Status) -> int:
        """How many cells ended so."""
        return sum(row.status == status for row in self.rows)

    @property
    def code(self) -> int:
        """0, the exit code that all failing cells share, or that of publishing."""
        codes = {row.code for row in self.rows if row.status == "failed"}
        return int(Exit.OK) if not codes else codes.pop() if len(codes) == 1 else int(Exit.PUBLISH)

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        statuses: Sequence[Status] = ("pushed", "skipped", "failed", "would push", "interrupted")
        counts = {status.replace(" ", "_"): self.count(status) for status in statuses}
        return {
            "registry": self.registry,
            **counts,
            "exit_code": self.code,
            "cells": [asdict(row) for row in self.rows],
        }
