"""The host's store of tuned caches, addressed by the inputs digest, so that nothing is tuned twice.

<cache home>/tuned/<inputs digest>/
    root/       a cache root: <flashinfer-version>/<arch>/<hash>/…
    outcome.json   what the tuning cost
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.files import write_json
from pipeline.contract.scratch import scratch

MAKING = ".entry-"  # what the folders are called in which an entry is made, or removed


@dataclass(frozen=True)
class Inputs:
    """All that decides what tuning would find: the digest of these addresses the store.

    `device` holds GPU names, driver and count, or the processor; `options` the tuning options; `previous` the sha256
    over an earlier cache that the ranks start from.
    """

    plan: str
    tuner: str
    device: Mapping[str, Any]
    options: Mapping[str, Any]
    previous: str = ""

    @property
    def digest(self) -> str:
        """sha256 over all fields."""
        return sha256_json(asdict(self))


@dataclass(frozen=True)
class Tuned:
    """A tuned cache root on the host, the seconds that tuning took, and whether it was in the store already."""

    root: Path
    seconds: float
    reused: bool


def take(home: Path, inputs: Inputs) -> Tuned | None:
    """What the store holds for these inputs; None when there is nothing, or only a damaged entry."""
    place = home / "tuned" / inputs.digest
    with contextlib.suppress(OSError, ValueError, KeyError):
        outcome = json.loads((place / "outcome.json").read_text(encoding="utf-8"))
        if (place / "root").is_dir():
            return Tuned(place / "root", float(outcome["seconds"]), reused=True)
    return None


def keep(home: Path, inputs: Inputs, root: Path, seconds: float) -> Tuned:
    """Move a judged cache root into the store, whole: filled beside its place, then renamed into it."""
    place = home / "tuned" / inputs.digest
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch(place.parent, MAKING) as temporary:
        work = temporary / "entry"
        shutil.copytree(root, work / "root")
        write_json(work / "outcome.json", {"seconds": round(seconds, 3), "inputs": asdict(inputs)})
        if place.exists():  # RETUNE=1, or a damaged entry: the old one leaves only when the new one is complete
            place.rename(temporary / "old")
        work.rename(place)
    return Tuned(place / "root", seconds, reused=False)
