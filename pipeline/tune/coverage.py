"""Which entry answers each bucket of each op: asked of the real `search_cache`, with real inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import canonical_json
from pipeline.contract.errors import WarmUpError
from pipeline.contract.manifest import Covered
from pipeline.contract.plan import OpPlan, Plan

from . import flashinfer_api
from .failures import doubt, least_ms
from .ops import Case
from .tuner import Lookup, ObservedTuner, Sample

if TYPE_CHECKING:
    import torch

_at = flashinfer_api.load()


class CoverageMissing(WarmUpError):
    """A bucket of the plan has no entry that answers for it; the tuning was partial."""


@dataclass(frozen=True)
class Call:
    """One call of an op: what the real `search_cache` was asked and answered, and the output."""

    out: torch.Tensor
    lookups: tuple[Lookup, ...]


@contextmanager
def settings(plan: Plan, op: OpPlan, *, tune: bool) -> Iterator[None]:
    """FlashInfer's `autotune()` with this op's buckets, this plan's rounding and skip_ops.

    Buckets and rounding enter every key, so tuning, checking and replaying must use the same; a server too.
    """
    with _at.autotune(tune, tuning_buckets=op.buckets, round_up=plan.round_up, skip_ops=set(plan.skip_ops)):
        yield


def call(tuner: ObservedTuner, case: Case, tokens: int) -> Call:
    """Run an op once and return what it looked up."""
    tuner.watch.clear()
    out = case.call(tokens)
    return Call(out, tuple(tuner.watch.lookups))


def cover(tuner: ObservedTuner, plan: Plan, op: OpPlan, case: Case, measured: Measured) -> list[Covered]:
    """Find the entry of every bucket of an op; raise `CoverageMissing` naming the buckets that have none."""
    rows: list[Covered] = []
    missing: list[str] = []
    with settings(plan, op, tune=False):
        for bucket in op.buckets:
            seen = call(tuner, case, bucket).lookups
            if not seen:
                missing.append(f"{op.name} at {bucket} tokens: search_cache was never called")
            for lookup in seen:
                if lookup.hit:
                    rows.append(measured.row(op, bucket, lookup))
                else:
                    why = measured.why_missing(op, lookup)
                    missing.append(f"{op.name} at {bucket} tokens: no entry answers, {why}; expected {lookup.key}")
    tuner.idle()
    if missing:
        raise CoverageMissing(
            f"{op.name}: {len(missing)} of {len(op.buckets)} buckets have no entry",
            details=missing,
            hint="nothing was saved; the details name each bucket, free memory or leave the op out with --skip-ops",
        )
    return rows


class Measured:
    """What was measured while tuning, by op of the plan and nearest profile: how each row came about."""

    def __init__(self, earlier: Sequence[Covered] = ()) -> None:
        self._samples: dict[tuple[str, str, Any], list[Sample]] = {}
        self._earlier = {row.entry: row for row in earlier}
        # What comparing found, by file key: fields of the manifest's row, times in milliseconds at the bucket
        self.compared: dict[str, Mapping[str, Any]] = {}

    def add(self, op: OpPlan, samples: Sequence[Sample]) -> None:
        """Keep the samples of one op."""
        for sample in samples:
            self._samples.setdefault((op.name, sample.custom_op, sample.profile), []).append(sample)

    def samples(self, op: OpPlan, custom_op: str, profile: Any) -> list[Sample]:  # noqa: ANN401 - FlashInfer's
        """What was measured for one op at one profile."""
        return self._samples.get((op.name, custom_op, profile), [])

    def row(self, op: OpPlan, bucket: int, lookup: Lookup) -> Covered:
        """The manifest's row for a bucket that `lookup` answered."""
        tried = self._samples.get((op.name, lookup.custom_op, lookup.profile), [])
        note = doubt([s.time_ms for s in tried], least_ms(op, bucket))
        if not tried:  # another op of the plan has the same key, and was tuned first
            tried = next((s for key, s in self._samples.items() if key[1:] == (lookup.custom_op, lookup.profile)), [])
            note = "tuned with another op of the same key" if tried else ""
        earlier = self._earlier.get(lookup.key)
        if not tried and earlier is not None:
            return replace(earlier, op=op.name, bucket=bucket)
        times = [s.time_ms for s in tried if (s.runner, s.tactic) == (lookup.runner, lookup.tactic)]
        row = Covered(
            op=op.name,
            bucket=bucket,
            entry=lookup.key,
            runner=lookup.runner,
            tactic=lookup.tactic,
            # Distinct ones: what was wrong is tuned again, and FlashInfer may time some of them twice
            candidates=len({(s.runner, canonical_json(s.tactic)) for s in tried}),
            failed=len({(s.runner, canonical_json(s.tactic)) for s in tried if not isfinite(s.time_ms)}),
            time_ms=round(times[0], 6) if times and isfinite(times[0]) else None,
            note=note,
        )
        compared = self.compared.get(lookup.key, {"note": ""})
        return replace(row, **{**compared, "note": "; ".join(filter(None, (note, compared["note"])))})

    def why_missing(self, op: OpPlan, lookup: Lookup) -> str:
        """What is known about a bucket without an entry."""
        tried = self._samples.get((op.name, lookup.custom_op, lookup.profile), [])
        errors = sorted({s.error for s in tried if s.error})
        if not tried:
            return "nothing was measured"
        if not any(isfinite(s.time_ms) for s in tried):
            there = f": {'; '.join(errors[:3])}" if errors else ", none of them on this rank"
            return f"each of {len(tried)} tactics failed on some rank{there}"
        return f"{len(tried)} tactics were tried, {len(errors) or 'none'} failed here: {'; '.join(errors[:3])}"
