"""The step `tune`: fill the stage `tuned`, read its directory back, judge it, keep it in the store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.cache.store import check_root
from pipeline.contract.errors import CacheRefused, PipelineError, UsageError, WarmUpError
from pipeline.contract.exits import Exit
from pipeline.contract.places import CACHE_ROOT, FAILURE_FILE
from pipeline.contract.scratch import scratch
from pipeline.run import ProcessTimedOut

from .contain import ContainerTooSlow
from .fill import Filler
from .provenance import stamp
from .store import Inputs, Tuned, check_writable, keep


class TuningFailed(WarmUpError):
    """The ranks failed, hung or disagreed inside the tuned stage."""


class TuningRefused(UsageError):
    """The tuner refused what it was told: a plan, an op or an option."""


class TuningCacheRefused(CacheRefused):
    """The tuner refused a cache: the one it should start from, or the one it made."""


# The tuner writes its own exit code into failure.json; a build step can only end with 0 or 1.
_CAUSES: dict[int, type[PipelineError]] = {
    int(Exit.USAGE): TuningRefused,
    int(Exit.WARM_UP): TuningFailed,
    int(Exit.CACHE): TuningCacheRefused,
}


class TuningTooSlow(WarmUpError):
    """The tuning did not end within --tune-max-wait."""


class TunedNothing(WarmUpError):
    """The tuned stage ended without a cache and without saying why."""


class TunedBadly(CacheRefused):
    """The tuned stage left a cache that must not be baked."""


def tune(how: Filler, inputs: Inputs, home: Path, logfile: Path, origin: Mapping[str, str]) -> Tuned:
    """Tune, judge, keep with `origin` as its provenance.

    Raise `TuningFailed` with what each rank said, `TuningTooSlow`, `TunedBadly` with every finding, or `StoreUnusable`.
    """
    began = time.monotonic()
    check_writable(home)
    (home / "contexts").mkdir(parents=True, exist_ok=True)
    with scratch(home / "contexts", ".tuning-") as temporary:
        place = temporary / "out"
        try:
            how.fill(place)
        except (ProcessTimedOut, ContainerTooSlow) as error:
            raise TuningTooSlow(
                f"the tuning outlived its bound: {error.message}", details=error.details, log=str(logfile),
                hint="--tune-max-wait is the bound in seconds; the same command again takes up what was finished",
            ) from error  # fmt: skip
        root = place / CACHE_ROOT.lstrip("/")
        _raise_failure(root / FAILURE_FILE, logfile)
        if not root.is_dir() or not any(root.iterdir()):
            raise TunedNothing(
                "the tuned stage left no cache and no reason",
                hint="see the log; run again with RETUNE=1",
                log=str(logfile),
            )
        tree, checked = check_root(root)
        findings = [str(finding) for finding in checked]
        plans = {stored.manifest.plan.digest for stored in tree.keys if stored.manifest is not None}
        if plans - {inputs.plan}:
            findings.append("the cache was tuned for another plan")
        if findings:
            raise TunedBadly(
                f"the tuned cache has {len(findings)} faults: {findings[0]}",
                details=findings[:20],
                hint="nothing was baked; run again with RETUNE=1",
                log=str(logfile),
            )
        stamp(tree, origin)
        return keep(home, inputs, root, time.monotonic() - began)


def _raise_failure(path: Path, logfile: Path) -> None:
    if not path.is_file():
        return
    told = json.loads(path.read_text(encoding="utf-8"))
    details = list(told.get("details", ()))
    for rank in told.get("ranks", ()):
        details.append(f"rank {rank.get('rank')}: last step {rank.get('step', 'unknown')}")
        details += [f"    {line}" for line in str(rank.get("stack", "")).splitlines()[:12]]
    raise _CAUSES.get(int(told.get("exit_code", Exit.WARM_UP)), TuningFailed)(
        str(told.get("message", "tuning failed")),
        details=details[-40:],
        hint=str(told.get("hint", "")),
        log=str(logfile),
    )
