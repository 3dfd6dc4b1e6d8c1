"""The tactic that is being run at the moment, so that one that ends its process, or never returns, can be named.

A rank writes it into its step file before each run. When the rank dies there, or stands still, the supervisor reads it,
starts the ranks again and tells them to leave that tactic out at that bucket. Standard library only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.digest import canonical_json
from pipeline.contract.files import write_json

_LONGEST = 2000  # characters of an attempt as JSON


@dataclass(frozen=True)
class Attempt:
    """A tactic of a runner, run for a profile of FlashInfer's; `entry` is the file key where a cache answered.

    All values as JSON has them. `bucket` is the token count that the profile stands for. `also` are the attempts that
    the same call looked up before this one and has not run yet, as of the two products of a MoE layer.
    """

    custom_op: str
    runner: str
    tactic: Any
    profile: Any
    bucket: int
    entry: str = ""
    also: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    @property
    def suspects(self) -> list[Attempt]:
        """What may have ended the process: the tactics of all entries of the call; a default only where it is alone."""
        every = [self, *(Attempt(**one) for one in self.also)]
        return [one for one in every if one.tactic != -1] or [self]

    @property
    def identity(self) -> bytes:
        """What tells this tactic at this profile from all others."""
        return identity(self.custom_op, self.runner, self.tactic, self.profile)

    @functools.cached_property  # judging says one and the same before each of its samples
    def fits(self) -> dict[str, Any] | None:
        """As a JSON value that a step file has room for; None where it has not."""
        value = asdict(self)
        return next((one for one in (value, {**value, "also": []}) if len(json.dumps(one)) <= _LONGEST), None)


def identity(custom_op: str, runner: str, tactic: Any, profile: Any) -> bytes:  # noqa: ANN401 - JSON, or tuples of it
    """The bytes by which a tactic at a profile is known."""
    return canonical_json([custom_op, runner, tactic, profile])


@dataclass(frozen=True)
class Crash:
    """An attempt that ended a rank, or did not return: in which op of the plan, and what came of it."""

    op: str
    attempt: Attempt
    reason: str

    def named(self) -> str:
        """Which tactic, where."""
        a = self.attempt
        return f"{a.runner} tactic {a.tactic} of {a.custom_op} at {a.bucket} tokens ({self.op})"

    def told(self) -> str:
        """In words."""
        return f"{self.named()}: {self.reason}"

    def blocked(self) -> dict[str, Any]:
        """The row of the manifest's `blocked`."""
        a = self.attempt
        where = {"op": self.op, "bucket": a.bucket, "tokens": a.bucket, "entry": a.entry, "custom_op": a.custom_op}
        return {**where, "runner": a.runner, "tactic": a.tactic, "reason": self.reason}


def write_crashes(path: Path, crashes: Sequence[Crash]) -> Path:
    """Write what the ranks must leave out."""
    write_json(path, [asdict(crash) for crash in crashes])
    return path


def read_crashes(path: Path | None) -> tuple[Crash, ...]:
    """What `write_crashes` wrote."""
    if path is None:
        return ()
    found: list[Mapping[str, Any]] = json.loads(path.read_bytes())
    return tuple(Crash(**{**one, "attempt": Attempt(**one["attempt"])}) for one in found)
