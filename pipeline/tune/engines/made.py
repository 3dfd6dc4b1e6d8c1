"""A key from an engine's own start: started, gathered, judged, put beside a manifest.

engine start ─▶ its files ─ the engine's rule, the record, the number of ranks ─▶ union ─▶ key
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.cache.engine_variables import VARIABLE_OF
from pipeline.cache.layouts import describe, layout_of
from pipeline.cache.layouts.collected import Collected, collect
from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_json
from pipeline.contract.key import make_key
from pipeline.contract.manifest import Manifest, RankFacts
from pipeline.contract.places import CACHE_FILE, ENGINE_DIR
from pipeline.contract.plan import Plan
from pipeline.contract.record import Record
from pipeline.tune.save import file_facts, publish
from pipeline.tune.supervise import temporary

from .apart import record_apart
from .judge import Expected, judge, only_group
from .serve import lay_config, ready

_SHOWN = 30


class TooFewGpus(UsageError):
    """The engine is told of more ranks than there are GPUs."""


def tune_with_engine(plan: Plan, out: Path, *, max_wait: float) -> dict[str, Any]:
    """Let the plan's engine tune and write its key below `out`; return what the tuner tells of a run."""
    engine = plan.engine
    assert engine is not None
    layout = layout_of(engine.name)
    started = _now()
    record = _record(plan)
    lay_config(engine)
    with temporary() as work:
        home = work / "engine"
        home.mkdir()
        variable = {VARIABLE_OF[engine.name]: str(home)}
        logfile = work / "engine.log"
        with (
            log.step(f"{engine.name} {engine.version} tunes in its own start"),
            ready(engine, variable, logfile, max_wait) as seconds,
        ):
            log.note(f"{engine.name} was ready after {seconds:.1f} s")
        group = only_group(layout, home, engine, logfile)
        found = collect(group, plan.layout.world)
        judge(layout, group, found, Expected(plan.layout.world, record))
        union = work / CACHE_FILE
        write_json(union, found.value())
        files = {
            f"{ENGINE_DIR}/{one.path.relative_to(home)}": one.path for one in group.files
        }  # fmt: skip
        facts = {CACHE_FILE: file_facts(union), **{name: file_facts(path) for name, path in files.items()}}
        options = {"layout": describe(layout, group, engine, {**os.environ, **engine.variables})}
        manifest = _manifest(plan, record, found, seconds)
        manifest = replace(manifest, files=facts, options=options, started=started)
        place = publish(out, make_key(plan.digest, record), union, manifest, files)
    return {
        "key": manifest.key,
        "path": str(place),
        "ranks": len(manifest.ranks),
        "strategy": manifest.strategy,
        "entries": len(found.entries),
        "covered": len(manifest.covered),
        "sha256": facts[CACHE_FILE].sha256,
        "seconds": round(seconds, 3),
        "notes": list(manifest.notes),
        "substitutions": [],
        "phases": {"engine": round(seconds, 3)},
    }


def _record(plan: Plan) -> Record:
    """This environment's record, one GPU name for each rank."""
    record = record_apart()
    world = plan.layout.world
    if plan.device == "cpu":
        return record
    if len(record.host.gpus) < world:
        raise TooFewGpus(
            f"{world} ranks, {len(record.host.gpus)} GPUs visible",
            hint="the sizes in ENGINE_ARGS say how many ranks there are; make as many GPUs visible",
        )
    return replace(record, host=replace(record.host, gpus=record.host.gpus[:world]))


def _manifest(plan: Plan, record: Record, found: Collected, seconds: float) -> Manifest:
    engine = plan.engine
    assert engine is not None
    gpus = record.host.gpus or ("",) * plan.layout.world
    device = "cuda" if record.host.gpus else "cpu"
    notes = ["which candidates were timed, and against what, is the engine's own affair: coverage cannot be told"]
    if found.differ:
        notes.append(
            f"{found.differ} shapes are answered differently by ranks that tune apart: {CACHE_FILE} has the first's, "
            f"and the engine reads its own files below {ENGINE_DIR}/"
        )
    return Manifest(
        key=str(make_key(plan.digest, record)),
        plan=plan,
        record=record,
        strategy="engine",
        strategy_reason=f"{engine.name} {engine.version} tuned in its own start, with dummy weights",
        ranks=tuple(
            RankFacts(rank, "", f"{device}:{rank}" if gpus[rank] else device, gpus[rank], "", held, round(seconds, 3))
            for rank, held in enumerate(found.held)
        ),
        owners=found.owners,
        covered=found.rows(),
        files={},
        started="",
        ended=_now(),
        notes=tuple(notes),
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
