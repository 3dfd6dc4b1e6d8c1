"""How a rank that tunes begins: meet the others, read the record, agree on everything, load what is known already."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.contract.errors import UsageError, WarmUpError
from pipeline.contract.files import write_whole
from pipeline.contract.manifest import Module
from pipeline.contract.plan import Plan
from pipeline.contract.record import Record
from pipeline.flashinfer.moe_keys import key_problems
from pipeline.flashinfer.ops import is_skipped

from . import flashinfer_api, hooks
from .agreement import one_gpu_each
from .arguments import read_plan
from .checkpoint import Known, find_earlier, find_finished
from .collectives import Ranks, join
from .compare.decide import SECONDS, Budget
from .compare.second import Second
from .coverage import Measured
from .cpu_shim import CPU_KNOBS
from .ops import spec_of
from .record import read_record
from .steps import Crash
from .strategies import Strategy, choose, holders
from .tuner import BLOCKLIST, ObservedTuner

if TYPE_CHECKING:
    from .ops import Case
    from .steps import Steps


class PlanElsewhere(UsageError):
    """The plan was made for another FlashInfer, device or number of ranks than are here."""


class TooFewGpus(UsageError):
    """There are more ranks on this host than GPUs."""


class DeviceChanged(WarmUpError):
    """A rank is no longer on the GPU that it began with."""


class NothingTuned(UsageError):
    """Every op of the plan is left out by skip_ops."""


@dataclass(frozen=True)
class Options:
    """What the supervisor gave this rank, options.json of its working directory `work`.

    `endpoint` is where several nodes meet; `crashes` are the tactics that ended a rank of an earlier run.
    """

    plan: Path
    work: Path
    timeout: float
    endpoint: str
    compare: str
    compare_budget: float | None  # seconds for each bucket of an op; None: what the device needs
    second_process: str | None  # on: a second process of each rank times entries as well; None: what the device needs
    strategy: str
    previous: Path | None
    state: Path | None
    crashes: tuple[Crash, ...]


def read_options(work: Path) -> Options:
    """The options of a run, as `supervisor.run_with_restarts` wrote them."""
    value: dict[str, Any] = json.loads((work / "options.json").read_bytes())
    paths = {name: value[name] and Path(value[name]) for name in ("plan", "work", "previous", "state")}
    return Options(**{**value, **paths, "crashes": tuple(Crash.from_json(one) for one in value["crashes"])})


@dataclass
class Session:
    """All that this rank has while it tunes."""

    options: Options
    plan: Plan
    ranks: Ranks
    device: torch.device
    record: Record
    tuner: ObservedTuner
    strategy: Strategy
    facts: list[dict[str, Any]]  # of each rank: host, device, GPU; for the manifest
    started: str
    began: float
    measured: Measured
    began_with: frozenset[str]  # keys of the entries that all ranks were given
    previous: str  # sha256 of the earlier cache that they are from
    notes: list[str]
    # What the manifest names: tactics found wrong, left out at their bucket, and the crashed ones of earlier runs
    # (`options.crashes`), which `tuner.banned` keeps from being measured. The user's own are in BLOCKLIST.
    blocked: list[dict[str, Any]]
    compare_budget: Budget = field(default_factory=lambda: Budget(0.0))
    second: Second = field(default_factory=Second)
    used: dict[int, list[str]] = field(default_factory=dict)  # by index of the op: keys of the entries that answer it
    cases: dict[int, Case] = field(default_factory=dict)
    modules: tuple[Module, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase
    unkept: str = ""  # why this rank could not keep what it had finished

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a block to a phase."""
        began = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began

    def deciding(self) -> dict[str, Any]:
        """All beside the plan that decides what a tuning chooses."""
        return _deciding(self.options, self.strategy, self.record, self.tuner, self.ranks.world)

    def devices(self) -> dict[str, str]:
        """Rank to GPU UUID (on a CPU to `cpu`). Raises `DeviceChanged` where this rank has left its own."""
        mine = self.facts[self.ranks.rank]["uuid"]
        if self.device.type == "cuda":
            now_on = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            if now_on != mine:
                raise DeviceChanged(
                    f"rank {self.ranks.rank} is on GPU {now_on}, it began on {mine}",
                    hint="an op made another device current",
                )
        return {str(one["rank"]): one["uuid"] or one["device"] for one in self.facts}


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin(options: Options, steps: Steps) -> Session:
    """Import, meet the others, read the record, agree on all that must be equal before anything is tuned."""
    began, started = time.monotonic(), now()
    plan = hooks.changed("plan", read_plan(options.plan))
    device = take_device(plan)
    budget = SECONDS if options.compare_budget is None else options.compare_budget
    options = replace(options, second_process=_second_process(options, device), compare_budget=budget)
    tuner = ObservedTuner(CPU_KNOBS if device.type == "cpu" else {}, on_try=steps.attempt)
    flashinfer_api.install(tuner)
    world = int(os.environ["WORLD_SIZE"])
    ranks = join(options.work, options.endpoint, options.timeout, steps, holders(plan, world))
    steps.say("reading the environment record")
    facts = ranks.gather(_device_facts(ranks.rank, device))
    ranks.hosts = tuple(one["host"] for one in facts)
    one_gpu_each(facts)
    record = read_record(plan.device, gpus=[one["gpu"] for one in facts] if device.type == "cuda" else ())
    ranks.contract(_contract(plan, record, options), "before tuning")
    _check_plan(plan, record, world)
    version, can = flashinfer_api.version(), flashinfer_api.has_process_group()
    strategy = choose(options.strategy, plan, world, version=version, process_group=can)
    steps.say("reading earlier entries")
    decided = _deciding(options, strategy, record, tuner, world)
    found = None
    if ranks.rank == 0:
        found = find_earlier(options.previous, record), find_finished(options.state, plan, decided)
    earlier, finished = ranks.broadcast(found)
    bad = _load_known(options, ranks.rank, tuner, earlier, finished)
    session = Session(
        options, plan, ranks, device, record, tuner, strategy, facts, started, began,
        measured=Measured((*earlier.covered, *finished.covered)),
        began_with=frozenset(flashinfer_api.entries(tuner)),
        previous=earlier.sha256,
        notes=[*earlier.notes, *finished.notes, *flashinfer_api.blocklist_told(tuner, BLOCKLIST)],
        blocked=[*finished.blocked, *(crash.blocked() for crash in options.crashes)],
    )  # fmt: skip
    session.notes += [f"{bad} of the entries known already are on {BLOCKLIST}, and were tuned again"] if bad else []
    steps.begin()
    return session


def take_device(plan: Plan, *, share_gpu: bool = False) -> torch.device:
    """This rank's device, made current. Raises `TooFewGpus`.

    The local rank is the launcher's; a launcher that sets none runs one host, where it is the rank.
    """
    if plan.device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK") or os.environ["RANK"])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    found = torch.cuda.device_count()
    if found == 0 or (ranks > found and not share_gpu):
        raise TooFewGpus(
            f"{ranks} ranks on this host, {found} GPUs visible",
            hint="make as many GPUs visible as the plan has ranks",
        )
    device = torch.device("cuda", local % found)
    torch.cuda.set_device(device)
    return device


def _check_plan(plan: Plan, record: Record, world: int) -> None:
    """Refuse a plan that was not made for this environment; raise `PlanElsewhere` with every reason."""
    wrong: list[str] = []
    here = record.flashinfer["flashinfer_version"]
    if plan.flashinfer_version != here:
        wrong.append(f"the plan is for FlashInfer {plan.flashinfer_version}, installed is {here}")
    if plan.arch != record.arch:
        wrong.append(f"the plan is for the architecture {plan.arch!r}, this is {record.arch!r}")
    if len({op.name for op in plan.ops}) != len(plan.ops):
        wrong.append("two ops of the plan have one name")
    wrong += [f"{op.name} is assigned to rank {r} of {world}" for op in plan.ops for r in op.ranks if r >= world]
    wrong += key_problems(plan.ops, here)
    homes = {op.name: spec_of(op).device for op in plan.ops}
    wrong += [
        f"{name} runs on {home}, the plan is for {plan.device}" for name, home in homes.items() if home != plan.device
    ]
    if wrong:
        raise PlanElsewhere(wrong[0], details=wrong, hint="make the plan again with `pipeline plan`, for this machine")
    if all(is_skipped(op.op, plan.skip_ops) for op in plan.ops):
        raise NothingTuned(
            f"skip_ops ({', '.join(plan.skip_ops)}) leaves nothing to tune", hint="plan again with fewer --skip-ops"
        )


def _load_known(options: Options, rank: int, tuner: ObservedTuner, earlier: Known, finished: Known) -> int:
    """Give the tuner what is known; return how many of its entries the user's own blocklist rules out."""
    if earlier.cache:
        place = options.work / f"rank-{rank}.previous.json"
        write_whole(place, earlier.cache)
        tuner.load_configs(str(place))
    flashinfer_api.add_entries(tuner, finished.entries)
    tuner.banned = frozenset(crash.attempt.identity for crash in options.crashes)
    bad = flashinfer_api.listed_as_bad(tuner)
    for key in [*bad, *(crash.attempt.entry for crash in options.crashes)]:
        flashinfer_api.forget(tuner, key)
    return len(bad)


def _deciding(options: Options, strategy: Strategy, record: Record, tuner: ObservedTuner, world: int) -> dict[str, Any]:
    """All beside the plan that decides what a tuning chooses: environment, strategy, ranks, and how it measures."""
    return {
        "record": record.key_inputs(),
        "strategy": strategy.name,
        "ranks": world,
        "warmup": tuner.warmup,
        "repeat": tuner.repeat,
        "comparing": [options.compare, options.compare_budget, options.second_process],
    }


def _second_process(options: Options, device: torch.device) -> str:
    """`on` where a rank has a second process that times entries: as asked; else on a GPU.

    Kernels of a CPU do not depend on the process.
    """
    if options.compare == "off":
        return "off"
    return options.second_process or ("on" if device.type == "cuda" else "off")


def _device_facts(rank: int, device: torch.device) -> dict[str, Any]:
    gpu, uuid = "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, uuid = torch.cuda.get_device_name(device), str(properties.uuid)
    return {"rank": rank, "host": socket.gethostname(), "device": str(device), "gpu": gpu, "uuid": uuid}


def _contract(plan: Plan, record: Record, options: Options) -> dict[str, Any]:
    """What must be equal on all ranks before anything is tuned."""
    return {
        "plan digest": plan.digest,
        "ops in order": [op.name for op in plan.ops],
        "seed": plan.seed,
        "skip_ops": sorted(plan.skip_ops),
        "round_up": plan.round_up,
        "buckets": {op.name: list(op.buckets) for op in plan.ops},
        "timeout": options.timeout,
        "strategy": options.strategy,
        "state": str(options.state or ""),
        "comparing": [options.compare, options.compare_budget, options.second_process],
        "crashed tactics": [crash.told() for crash in options.crashes],
        "environment record": record.key_inputs(),
        "FlashInfer's environment variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FLASHINFER_AUTOTUNE", "FLASHINFER_TACTICS", "FLASHINFER_CUDA_ARCH"))
        },
    }
