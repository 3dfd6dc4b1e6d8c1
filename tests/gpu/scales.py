"""Whether a cache answers callers of `bmm_fp8` whose scales have the shape (1,), as SGLang's, and with the same tactic.

    python -m tests.gpu.scales ROOT

Prints how many token counts were asked for, how many both shapes hit, and how many of these answers were alike.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .measure_cache import loaded


def _answers(tuner: Any, case: Any, tokens: int) -> list[tuple[Any, ...]]:
    tuner.watch.clear()
    tuner.watch.questions = []
    case.call(tokens)
    found = [(one.lookup.hit, one.lookup.runner, one.lookup.tactic) for one in tuner.watch.questions]
    tuner.watch.questions = None
    return found


def main(root: Path) -> None:
    """Ask for each bucket of each fp8 product twice."""
    import torch

    from pipeline.tune.coverage import settings
    from pipeline.tune.ops import spec_of

    tuner, manifest, device = loaded(root)
    plan = manifest.plan
    asked = hit = alike = 0
    with torch.no_grad():
        for op in (one for one in plan.ops if one.op == "bmm_fp8"):
            case: Any = spec_of(op).make(op, device, plan.seed)
            with settings(plan, op, tune=False):
                for bucket in op.buckets:
                    scalars = _answers(tuner, case, bucket)
                    kept = case._scales
                    case._scales = [scale.reshape(1) for scale in kept]
                    vectors = _answers(tuner, case, bucket)
                    case._scales = kept
                    asked += 1
                    hit += all(one[0] for one in (*scalars, *vectors))
                    alike += scalars == vectors
    print(json.dumps({"asked": asked, "both hit": hit, "alike": alike}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path, metavar="ROOT")
    main(parser.parse_args().root)
    os._exit(0)
