"""One rank that tunes, started by torchrun: `python -m pipeline.tune.worker …`, never by hand.

start empty or from one earlier cache → contract → tune each op in step → gather and compare → rank 0 saves →
every rank loads what was saved and finds each bucket's entry in it → rank 0 describes it. The supervisor puts it in
place, once every rank has ended well.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.files import write_json
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

from . import rank as life

if TYPE_CHECKING:
    from .steps import Steps


_PATIENCE = 60.0  # seconds that the second process may take for one answer, inputs and all


def work(options: argparse.Namespace, steps: Steps) -> None:
    """Everything one rank does."""
    steps.say("importing torch and FlashInfer")
    from .compare.second import started
    from .jit import prebuild
    from .session import Options, begin
    from .settle import check_saved, manifest_of, settle
    from .state import all_terms
    from .tuning import tune

    session = begin(Options(**vars(options)), steps)
    patience = min(_PATIENCE, session.options.timeout / 2)
    wanted = bool(session.options.workers)
    with started(wanted, session.options.plan, session.device, patience) as session.second:
        prebuild(session)
        session.second.meet(session.ranks)
        tune(session)
    owners = settle(session)
    saved, covered = check_saved(session)
    if session.ranks.rank == 0:
        steps.say("writing the manifest")
        manifest = manifest_of(session, saved, owners, covered)
        write_json(saved.with_name(MANIFEST_FILE), manifest.to_json())
        write_json(life.terms_path(options.work), all_terms(session.plan, session.deciding()))
        write_json(
            life.result_path(options.work, 0),
            {
                "key": manifest.key,
                "ranks": session.ranks.world,
                "strategy": manifest.strategy,
                "entries": sum(manifest.entries_per_op().values()),
                "covered": len(covered),
                "sha256": manifest.files[CACHE_FILE].sha256,
                "seconds": round(time.monotonic() - session.began, 3),
                "notes": list(manifest.notes),
                "substitutions": list(manifest.substitutions),
                "phases": {name: round(seconds, 3) for name, seconds in session.phases.items()},
            },
        )
    session.ranks.barrier()


def main() -> int:
    """Parse what the supervisor passed and live."""
    parser = argparse.ArgumentParser(prog="pipeline.tune.worker")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--previous", type=Path)
    parser.add_argument("--compare", choices=("on", "off"), default="on")
    parser.add_argument("--compare-budget", type=float)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--strategy", default="")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--no-resume", dest="resume", action="store_false")
    parser.add_argument("--crashed", type=Path)
    options = parser.parse_args()
    rank, _ = life.environment()
    return life.live(rank, options.work, lambda steps: work(options, steps))


if __name__ == "__main__":
    os._exit(main())
