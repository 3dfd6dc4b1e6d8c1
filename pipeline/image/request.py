"""What the user asked for, once, frozen: every later step reads it and none changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.cache.tree import Stored
from pipeline.contract.plan import Plan
from pipeline.planning.ops import Target

TuneIn = Literal["", "stage", "container", "import"]


@dataclass(frozen=True)
class Request:
    """One `pipeline build`. `root` is the checkout; all timeouts are seconds; empty means unset.

    `plan` makes the plan for a target, and for a FlashInfer version where the base brings its own. `first` is the plan
    that it gave before anything was known of engine and base: what is wrong with the model was said by then. It is None
    where a server warms up.
    """

    root: Path
    model: str
    plan: Callable[[Target | None, str], Plan] | None = None
    first: Plan | None = None
    server: str = ""  # vllm or sglang
    server_args: str = ""
    server_env: str = ""
    device: str = ""  # cpu, cuda, or empty: cuda where the engine has GPUs
    base_image: str = ""
    accept_base_versions: bool = False
    image: str = ""
    retune: bool = False
    resume: bool = True  # from what an interrupted tuning had finished; never when tuning again on purpose
    previous: Path | None = None
    caches: tuple[Stored, ...] = ()  # keys to bake instead of tuning, checked
    tune_in: TuneIn = ""
    tune_options: tuple[str, ...] = ()  # for the tuner
    gpus: str = ""
    require_idle: bool = False
    bake_jit: bool = True
    startup_timeout: float = 1200.0
    tune_timeout: float = 7200.0
    device_timeout: float = 3600.0  # how long to wait for another run that times the same devices
    store: str = ""  # image store of an engine that has to be started
