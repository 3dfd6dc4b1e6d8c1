"""Places at which a test may plant a fault: PIPELINE_TUNE_TEST_HOOKS names a Python file, whose functions are called.

The product never sets the variable. A function is called by the name of a place, with what is known there; whatever it
raises, or however long it takes, happens there:

    worker_start()                            a process beside a rank begins
    make_bench(bucket)                        before the candidates of an entry are prepared
    timed_call(inputs, tactic)                before each call of a candidate that is prepared or timed
    launch(inputs, runner, tactic)            before each sample on a GPU
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any

ENV_HOOKS = "PIPELINE_TUNE_TEST_HOOKS"

planted: dict[str, Callable[..., Any]] = runpy.run_path(os.environ[ENV_HOOKS]) if os.environ.get(ENV_HOOKS) else {}


def at(place: str, *known: object) -> None:
    """Call what is planted at a place, if anything is."""
    if place in planted:
        planted[place](*known)
