"""Inside a container: would the baked caches be used here? Compares the whole record, which torch must be there for.

python -m pipeline.tune.explain [--json] [ROOT]       0 used, 7 not
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pipeline import log
from pipeline.cache.environment import from_record
from pipeline.cache.explain import explain_tree
from pipeline.cache.tree import walk
from pipeline.contract.errors import Exit, PipelineError
from pipeline.contract.places import CACHE_ROOT, ENV_CACHE_DIR

from .arguments import need_torch
from .record import read_record


def main(words: list[str]) -> int:
    """Explain the caches below ROOT to the process's own environment."""
    paths = [word for word in words if word != "--json"]
    root = Path(paths[0] if paths else os.environ.get(ENV_CACHE_DIR) or CACHE_ROOT)
    try:
        need_torch("pipeline explain FILE|DIR|IMAGE")
        import torch

        record = read_record("cuda" if torch.cuda.is_available() else "cpu")
        found = explain_tree(walk(root), from_record(record, "this process"), baked=True)
    except PipelineError as error:
        log.fail(error)
        return int(error.exit_code)
    print(json.dumps(found.to_json(), indent=2) if "--json" in words else "\n".join(found.lines()))  # noqa: T201 - data
    return int(Exit.OK if found.verdict == "ok" else Exit.CACHE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
