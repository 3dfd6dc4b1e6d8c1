"""torchrun, with its verdict on a failed run written down: `python -m pipeline.tune.launch FILE <torchrun arguments>`.

torchrun knows which rank ended first and by which signal, but only prints it. This runs torchrun's own parser and
main function and writes what it raised to FILE.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.contract.files import write_json

from .tied import starter, tie


def main(words: list[str]) -> int:
    """Run torchrun; return 0 when every rank ended with 0, else 1."""
    tie()  # without its supervisor nobody bounds the ranks; importing takes seconds
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.update(starter())
    try:
        run.run(run.parse_args(words[1:]))
    except ChildFailedError as error:
        # In the order in which torchrun saw them end: the others it ended itself, and its times are whole seconds.
        ended = [
            {"rank": rank, "pid": one.pid, "status": one.exitcode, "when": one.timestamp}
            for rank, one in error.failures.items()
        ]
        write_json(Path(words[0]), ended)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
