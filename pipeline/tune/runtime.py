"""For one's own code in a tuned image: load the right cache into FlashInfer, with the buckets it was tuned for.

    from pipeline.tune.runtime import tuned

    with tuned():
        model(x)

Nothing is measured. Buckets and rounding enter FlashInfer's keys, so the context sets those of the plan. Loaded
entries stay in FlashInfer after the context; entering it again costs a dictionary look-up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.cache.environment import from_record
from pipeline.cache.explain import explain_tree
from pipeline.cache.pick import HostInfo, choose, keys_below, read_baked
from pipeline.cache.tree import Tree, read_key
from pipeline.contract.errors import CacheRefused
from pipeline.contract.places import CACHE_FILE, CACHE_ROOT, ENV_CACHE_DIR, ENV_KEY
from pipeline.contract.plan import Plan
from pipeline.contract.record import Key, Record

ENV_REQUIRE = "PIPELINE_REQUIRE_TUNED"

_lock = threading.Lock()
_known: dict[tuple[str, str], Loaded] = {}
_warned: set[str] = set()


class NotTuned(CacheRefused):
    """No baked cache fits this process; every reason is among the details."""


@dataclass(frozen=True)
class Loaded:
    """A cache that FlashInfer holds: its file, its key, how many entries, and the plan it was tuned for."""

    path: Path
    key: str
    entries: int
    plan: Plan
    sample: str  # one entry's key: gone from FlashInfer when somebody cleared it


@contextmanager
def tuned(root: Path | str | None = None, *, key: str = "", require: bool | None = None) -> Iterator[Loaded | None]:
    """Run the block on tuned tactics; yield what was loaded, or None where no cache fits, after one warning.

    `root` is a cache root (default: `PIPELINE_AUTOTUNE_CACHE_DIR`, else the image's own), `key` one key or the first
    characters of its hash (default: `PIPELINE_TUNED_KEY`, else the only one that fits). With `require` (default:
    `PIPELINE_REQUIRE_TUNED`) a misfit raises `NotTuned` with every reason instead.
    """
    from . import flashinfer_api

    place = str(root or os.environ.get(ENV_CACHE_DIR) or CACHE_ROOT)
    wanted = key or os.environ.get(ENV_KEY, "")
    if require is None:
        require = os.environ.get(ENV_REQUIRE, "") not in ("", "0")
    at = flashinfer_api.load()
    try:
        loaded = _loaded(at, place, wanted)
    except CacheRefused as error:  # NotTuned, or what lies below the root is named like no key
        if require:
            raise
        if error.message not in _warned:
            _warned.add(error.message)
            log.warn(f"{error.message}; ops run on default tactics")
        yield None
        return
    plan = loaded.plan
    with at.autotune(False, tuning_buckets=_buckets(plan), round_up=plan.round_up, skip_ops=set(plan.skip_ops)):
        yield loaded


def _loaded(at: Any, place: str, wanted: str) -> Loaded:  # noqa: ANN401 - FlashInfer's module
    from . import flashinfer_api

    with _lock:
        known = _known.get((place, wanted))
        tuner = at.AutoTuner.get()
        if known is not None and flashinfer_api.loaded(tuner, known.sample):
            return known
        found = _known[place, wanted] = _load(tuner, place, wanted)
        return found


def _load(tuner: Any, place: str, wanted: str) -> Loaded:  # noqa: ANN401 - an AutoTuner
    import torch

    from .record import read_record

    record = read_record("cuda" if torch.cuda.is_available() else "cpu")
    chosen, why = choose([read_baked(place, name) for name in keys_below(place)], _half(record), wanted)
    if chosen is None:
        raise NotTuned(f"no tuned cache is used: {why}", hint="`pipeline explain IMAGE --live` says more")
    stored = read_key(Path(place), Key.parse(chosen.key))
    found = explain_tree(Tree(Path(place), (stored,)), from_record(record, "this process"), baked=True)
    if found.verdict != "ok" or stored.file is None or stored.manifest is None:
        raise NotTuned(
            f"the tuned cache {chosen.key} is not used: {found.because}",
            details=found.lines(),
            hint="run the image that it was baked into, on the GPU it was tuned for",
        )
    if not tuner.load_configs(str(stored.path / CACHE_FILE)):
        raise NotTuned(f"FlashInfer refused {stored.path / CACHE_FILE}", hint="its log says why")
    usable = next(name for name, entry in stored.file.entries.items() if not entry.dropped)
    return Loaded(stored.path / CACHE_FILE, chosen.key, found.entries, stored.manifest.plan, usable)


def _half(record: Record) -> HostInfo:
    """This process among its ranks: one GPU name per rank, as in the manifest."""
    import torch.distributed as dist

    if record.host.cpu:
        return HostInfo(cpu=dict(record.host.cpu))
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    names: Mapping[str, str] = record.flashinfer
    return HostInfo((names["gpu"],) * world)


def _buckets(plan: Plan) -> tuple[int, ...]:
    """The buckets that all ops share: FlashInfer takes one list for every op, and each must have an entry for all."""
    shared = set.intersection(*(set(op.buckets) for op in plan.ops))
    if not shared:
        raise NotTuned(
            "the ops of this plan share no bucket, and FlashInfer takes one list for all",
            hint="plan again with the same buckets for every op",
        )
    return tuple(sorted(shared))
