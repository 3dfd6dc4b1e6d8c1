"""What the user asked for, once, frozen: every later step reads it and none changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.contract.plan import Plan
from pipeline.planning.ops import Target

TuneIn = Literal["", "stage", "container", "import"]


@dataclass(frozen=True)
class Request:
    """One `pipeline build`. `root` is the checkout; `timeout`, `max_wait`, `max_tune` are seconds; empty means unset.

    `plan` makes the plan for a target, and for a FlashInfer version where the base brings its own; it was
    called once already, so what can be wrong with the model or the options was said before any work.
    """

    root: Path
    plan: Callable[[Target | None, str], Plan]
    device: str = ""  # cpu, cuda, or empty: cuda where the engine has GPUs and the base has FlashInfer
    base_image: str = ""
    accept_base_versions: bool = False
    image: str = ""
    retune: bool = False
    resume: bool = True  # take up what an interrupted tuning had finished; never when tuning again on purpose
    previous: Path | None = None
    caches: tuple[Path, ...] = ()
    tune_in: TuneIn = ""
    strategy: str = ""  # as the ranks are told it among the options below
    tune_options: tuple[str, ...] = ()  # for `python -m pipeline.tune`
    gpus: str = ""  # a CDI device name
    require_idle: bool = False
    bake_jit: bool = True
    max_wait: float = 1200.0
    max_tune: float = 7200.0
    store: str = ""  # image store of an engine that has to be started
