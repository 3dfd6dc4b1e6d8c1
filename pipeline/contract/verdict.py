"""verdict.json: what a verify found. A file, and later a referrer; never a label, which would change the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .errors import CacheRefused

SCHEMA = 1
Level = Literal["static", "replay"]
Result = Literal["pass", "fail"]


class VerdictInvalid(CacheRefused):
    """verdict.json is not a verdict."""


@dataclass(frozen=True)
class Verdict:
    """Bound to one image by its config digest, and to one cache by the layer's diff id and the manifest's sha256.

    `findings` is empty exactly when `result` is `pass`. `checks` counts what was looked at, so that a verdict
    that looked at nothing cannot be mistaken for one that found nothing. `replayed` lists the keys that were replayed
    where others could not be, since their device is elsewhere; a verdict of the level `replay` replayed all.
    """

    config_digest: str
    cache_diff_id: str
    manifest_sha256: str
    key: str
    device: str  # the GPU's or processor's name
    level: Level
    result: Result
    checks: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    replayed: tuple[str, ...] = ()

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
        """Read a verdict; raise `VerdictInvalid` when it is not one."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise VerdictInvalid("not a verdict of this version")
        try:
            fields = {k: v for k, v in value.items() if k != "schema"}
            lists = {name: tuple(fields.get(name, ())) for name in ("findings", "replayed")}
            verdict = Verdict(**{**fields, **lists})
        except TypeError as error:
            raise VerdictInvalid(f"not a verdict: {error}") from error
        if verdict.level not in ("static", "replay") or verdict.result not in ("pass", "fail"):
            raise VerdictInvalid(f"level {verdict.level!r} and result {verdict.result!r} are not a verdict's")
        if (verdict.result == "pass") != (not verdict.findings):
            raise VerdictInvalid("a passing verdict has no findings and a failing one has some")
        if not set(verdict.replayed) <= set(verdict.key.split(",")):
            raise VerdictInvalid("a verdict says that it replayed a key that it is not about")
        return verdict
