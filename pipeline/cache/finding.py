"""What is wrong with a cache: the causes by their short names, and one finding of one cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# The short names that `because` shows, beside those of `contract.strictjson`: an interface that scripts compare.
NO_METADATA = "_metadata missing: FlashInfer would load it unchecked"
BAD_METADATA = "_metadata is not an object"
BAD_RECORDS = "_records is not an object"
BAD_ENTRY = "entry"
NO_ENTRIES = "no entries"
DROPPED = "FlashInfer drops integer cuDNN tactics"
WILDCARD = "wildcard is never safe"  # after the field's name

_KEPT = 1000  # findings of one cause: a hostile file can have millions


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, what, and what to do; `because` is the cause's short name where it has one."""

    where: str
    what: str
    hint: str = ""
    because: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class Tally:
    """Findings of one cause at one place: the first thousand are kept in `found`, the others counted."""

    def __init__(self, found: list[Finding], where: str, because: str, hint: str = "") -> None:
        self._found = found
        self._where = where
        self._because = because
        self._hint = hint
        self._count = 0

    def add(self, what: Callable[[], str]) -> None:
        """Count one more; `what` is spelled only where it is kept."""
        self._count += 1
        if self._count <= _KEPT:
            self._found.append(Finding(self._where, what(), self._hint, self._because))

    def close(self) -> None:
        """Say how many were left out."""
        if self._count > _KEPT:
            what = f"and {self._count - _KEPT:,} more of this kind"
            self._found.append(Finding(self._where, what, self._hint, self._because))


def because(findings: Iterable[Finding]) -> str:
    """The distinct causes of several findings, in their order, as one line."""
    return "; ".join(dict.fromkeys(f.because or f.what for f in findings))


def lines(findings: Iterable[Finding], limit: int = 50) -> tuple[str, ...]:
    """Findings as lines for an error's details, the tail counted instead of shown."""
    every = [str(finding) for finding in findings]
    return tuple(every[:limit]) + ((f"… and {len(every) - limit} more",) if len(every) > limit else ())
