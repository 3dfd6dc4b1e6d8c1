"""Places at which a test may plant a fault: PIPELINE_TUNE_TEST_HOOKS names a Python file, whose functions are called.

The product never sets the variable. The file is run when the tuner is imported, in every process of it. A function of
it is called by the name of a place, with what is known there; whatever it raises, or however long it takes, happens
there. Of the last group it returns another value than the one that it is given, or None for no change.

    started()                                 a rank or a process beside one begins, before torch is imported
    importing()                               a rank has said that it imports
    preparing(runner), drawing_inputs(), copying_inputs()
                                              what FlashInfer does before it times a tactic
    looking_up(tuner)                         an op asks FlashInfer for a tactic
    before_tactic(inputs, tactic)             before each call of a tactic that FlashInfer measures
    cpu_mm(tactic, a, b, out)                 after each product of `cpu_mm`; the default is tactic -1
    make_bench(bucket)                        before the candidates of an entry are prepared
    timed_call(inputs, tactic, call)          before each call of a candidate that is prepared or timed
    launch(inputs, runner, tactic)            before each sample on a GPU
    before_save()                             before finished buckets are written to --state
    done()                                    all ranks have met for the last time

    python(path)                              the interpreter that the supervisor starts ranks with
    cuda(module)                              torch.cuda where candidates are timed: another one is used on a CPU too
    spec(spec, op)                            how an op of the plan is fed, called and checked: its `OpSpec`
    plan(plan)                                the plan that this rank has read
    contract(said, when)                      what this rank says before all compare it
    measured(time_ms, tactic)                 the time that FlashInfer found for a tactic
    context_lost(why)                         why nothing runs on this process's device any more; empty on a CPU
    entries(held)                             the entries that this rank ends with
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any, TypeVar

ENV_HOOKS = "PIPELINE_TUNE_TEST_HOOKS"
T = TypeVar("T")

planted: dict[str, Callable[..., Any]] = runpy.run_path(os.environ[ENV_HOOKS]) if os.environ.get(ENV_HOOKS) else {}


def at(place: str, *known: object) -> None:
    """Call what is planted at a place, if anything is."""
    if place in planted:
        planted[place](*known)


def changed(place: str, value: T, *known: object) -> T:
    """The value, or what is planted at a place makes of it."""
    found: T | None = planted[place](value, *known) if place in planted else None
    return value if found is None else found
