"""The host's store of tuned caches, addressed by the inputs digest, so that nothing is tuned twice.

<cache home>/tuned/<inputs digest>/
    root/       a cache root: <flashinfer-version>/<arch>/<hash>/…
    outcome.json   what the tuning cost
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError
from pipeline.contract.files import write_json
from pipeline.contract.scratch import scratch

MAKING = ".entry-"  # what the folders are called in which an entry is made, or removed


class StoreUnusable(UsageError):
    """The store of tuned caches cannot be written to."""


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


def check_writable(home: Path) -> None:
    """See before anything is tuned that the store takes entries. Raises `StoreUnusable`."""
    with _making(home / "tuned"):
        pass


@contextlib.contextmanager
def _making(store: Path) -> Iterator[Path]:
    """A folder in the store for an entry that is made. Raises `StoreUnusable` for every answer of the file system."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with scratch(store, MAKING) as temporary:
            yield temporary
    except (OSError, shutil.Error) as error:  # of a tree that was copied, a list of what failed
        last = str(error.args[0][-1][-1]).partition(": ")[0] if isinstance(error, shutil.Error) else error.strerror
        raise StoreUnusable(
            f"the store {store} cannot be written to: {last}",
            hint="check free space and permissions; XDG_CACHE_HOME moves it",
        ) from error


def keep(home: Path, inputs: Inputs, root: Path, seconds: float) -> Tuned:
    """Move a judged cache root into the store, whole: made beside its place, then renamed into it.

    Raises `StoreUnusable`.
    """
    place = home / "tuned" / inputs.digest
    with _making(place.parent) as temporary:
        work = temporary / "entry"
        work.mkdir()
        shutil.move(root, work / "root")  # a rename, which needs no room, unless the store is a mount of its own
        write_json(work / "outcome.json", {"seconds": round(seconds, 3), "inputs": asdict(inputs)})
        if place.exists():  # RETUNE=1, or a damaged entry: the old one leaves only when the new one is complete
            place.rename(temporary / "old")
        work.rename(place)
    return Tuned(place / "root", seconds, reused=False)
