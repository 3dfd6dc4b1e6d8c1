"""The summary of a release for people, on stderr."""

from __future__ import annotations

import sys

from pipeline import log
from pipeline.contract.text import shown

from .outcome import Row, Summary

_HEAD = ("cell", "status", "image", "digest or reason")


def rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    """The table's cells, a row for each cell of the release."""
    return [(row.cell, row.status, row.image, _last(row)) for row in summary.rows]


def _last(row: Row) -> str:
    words = [row.digest[:19]] if row.digest else []
    words += [f"also {', '.join(row.moved)}"] if row.moved else []
    words += [shown(row.why, 300)] if row.why else []
    return "; ".join(words)


def show(summary: Summary) -> None:
    """Draw the table and one line that counts."""
    table = rows(summary)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*_HEAD, box=None, pad_edge=False)
        for row in table:
            drawn.add_row(*row)
        Console(stderr=True).print(drawn)
    else:
        widths = [max(len(row[at]) for row in [_HEAD, *table]) for at in range(3)]
        for row in [_HEAD, *table]:
            padded = [word.ljust(width) for word, width in zip(row, widths, strict=False)]
            log.line("  ".join([*padded, row[3]]).rstrip())
    hints = dict.fromkeys(row.hint for row in summary.rows if row.hint)
    for hint in hints:
        log.line(f"hint: {hint}")
    statuses = ("pushed", "would push", "skipped", "failed", "interrupted")
    counted = [f"{number} {status}" for status in statuses if (number := summary.count(status))]  # type: ignore[arg-type]
    log.line(f"{summary.registry}: {', '.join(counted) or 'nothing to release'}")
