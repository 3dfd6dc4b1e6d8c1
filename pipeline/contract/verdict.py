"""verdict.json: what a verify found. A file, and later a referrer; never a label, which would change the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from .decode import decode, load
from .errors import CacheRefused

SCHEMA = 2
# `replay`: every tuned op was called in fresh containers, or the server was started in them. `static`: files alone.
Level = Literal["static", "replay"]
Result = Literal["pass", "fail"]


class VerdictInvalid(CacheRefused):
    """verdict.json is not a verdict."""


@dataclass(frozen=True)
class Verdict:
    """Bound to one image by its identity, and to one cache by the last layer's diff id and the manifests.

    `findings` is empty exactly when `result` is `pass`. `checks` counts what was looked at, so that a verdict
    that looked at nothing cannot be mistaken for one that found nothing. `replayed` lists the keys that were replayed
    where others could not be, since their device is elsewhere; a verdict of the level `replay` replayed all. `starts`
    has the seconds of each start of a server in the finished image, by phase; `ready` is the whole.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    identity: str
    cache_diff_id: str
    manifest_sha256: str
    key: str
    device: str  # the GPU's or processor's name
    level: Level
    result: Result
    checks: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    replayed: tuple[str, ...] = ()
    starts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # who started it: root, another user

    def replayed_keys(self) -> tuple[str, ...]:
        """The keys that this verdict proves by a replay; none when it failed."""
        if self.result != "pass":
            return ()
        return tuple(self.key.split(",")) if self.level == "replay" else self.replayed

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(value: object) -> Verdict:
        """Read a verdict; raise `VerdictInvalid` naming each field that is wrong."""
        return decode(Verdict, value, "the verdict", VerdictInvalid)

    @staticmethod
    def load(data: bytes) -> Verdict:
        """Read a verdict from bytes that anyone may have written; raise `VerdictInvalid`."""
        return load(Verdict, data, "the verdict", VerdictInvalid)

    def problems(self) -> Iterator[str]:
        """What is wrong though each field has the right type, for `decode`."""
        if (self.result == "pass") != (not self.findings):
            yield ".findings: a passing verdict has none, and a failing one has some"
        if not set(self.replayed) <= set(self.key.split(",")):
            yield ".replayed: a key that the verdict is not about"


class VerifyFailed(CacheRefused):
    """The image must not be used as a tuned image; every finding is among the details."""

    def __init__(self, verdict: Verdict, hint: str) -> None:
        first = verdict.findings[0] if verdict.findings else "no finding was recorded"
        super().__init__(f"{len(verdict.findings)} findings: {first}", details=verdict.findings, hint=hint)
