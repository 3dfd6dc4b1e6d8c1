"""Configuration errors of a plan, gathered and shown all at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.contract.errors import UsageError

_FIX = "fix that in the model's config.json, or download the file again"  # problems of that file have no hint


class PlanRefused(UsageError):
    """The model, the layout and the options cannot make a plan together."""


@dataclass
class Problems:
    """A list of problems that a few functions add to; `check` raises when there are any."""

    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, message: str, hint: str = "") -> None:
        """Note one problem with its remedy."""
        if (message, hint) not in self.found:
            self.found.append((message, hint))

    def lines(self) -> list[str]:
        """One line for each problem, its remedy in brackets."""
        return [message + (f" ({hint})" if hint else "") for message, hint in self.found]

    def check(self) -> None:
        """Raise `PlanRefused` with every problem: one alone is the message, several are its details."""
        if not self.found:
            return
        if len(self.found) == 1:
            message, hint = self.found[0]
            raise PlanRefused(message, hint=hint or _FIX)
        details = self.lines()
        raise PlanRefused(f"{len(details)} invalid settings", hint="fix them all, then plan again", details=details)
