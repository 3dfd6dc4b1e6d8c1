"""What is odd about how a bucket's tactic was chosen. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from pipeline.contract.manifest import Covered
from pipeline.contract.plan import OpPlan

from .strategy import weights

ONE_CANDIDATE = "one candidate: nothing to choose from"
MEASURED_NOTHING = "profiling measured nothing"
_FLOPS = 2e16  # per second: more than any single device does in any format


def least_ms(op: OpPlan, bucket: int) -> float:
    """A time that no device can beat for an op's multiplications at a token count, in milliseconds."""
    return 2e3 * bucket * weights(op) / _FLOPS


def doubt(times_ms: Sequence[float], least: float) -> str:
    """What to note about a choice among these times (infinite: failed); empty where nothing is odd."""
    alive = [time for time in times_ms if isfinite(time)]
    if len(alive) == 1:
        return ONE_CANDIDATE
    if alive and (max(alive) == 0 or max(alive) < least):
        return f"{MEASURED_NOTHING}: no tactic took more than {max(alive):.3g} ms, the work needs {least:.3g} ms"
    return ""


def doubtful(rows: Sequence[Covered]) -> list[str]:
    """One line for each op whose choice is none, with the buckets it concerns."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for why in (ONE_CANDIDATE, MEASURED_NOTHING):
            if row.note.startswith(why):
                found.setdefault((row.op, why), []).append(row.bucket)
    return [f"{op} at {', '.join(map(str, buckets))} tokens: {why}" for (op, why), buckets in found.items()]
