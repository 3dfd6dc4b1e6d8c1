"""Which of the baked keys fits a host, from names, sizes and the manifests' records alone.

Read by every start of a container. The whole record is compared where torch is imported (`judge`); here only its host
half is, and nothing is hashed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.errors import PipelineError
from pipeline.contract.manifest import SCHEMA
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.strictjson import read_bytes

_LARGEST = 64 * 1024 * 1024  # bytes of a manifest
_MOST = 1000  # keys looked at


@dataclass(frozen=True)
class HostInfo:
    """The host half of an environment: visible GPU names in order, or for a CPU its facts as the tuner records them."""

    gpus: tuple[str, ...] = ()
    cpu: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Baked:
    """One key as its manifest describes it; `broken` says in words what keeps it from being used.

    `path` is FlashInfer's file, `entries` how many one rank has, `files` maps names below the key's directory to bytes.
    """

    key: str
    path: str
    broken: str = ""
    gpus: tuple[str, ...] = ()
    cpu: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    entries: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """What it was tuned for, in words."""
        return ", ".join(dict.fromkeys(self.gpus)) or self.cpu.get("model", "an unknown device")

    def mismatch(self, here: HostInfo) -> str:
        """Why it does not fit a host; empty where it does."""
        for name, value in self.cpu.items():
            found = here.cpu.get(name, "")
            if found != value:
                what = "other CPU flags" if name == "flags" else f"{name} {value[:40]}, here {found[:40] or 'unknown'}"
                return f"tuned for {what}"
        if self.cpu:
            return ""
        if not here.gpus:
            return f"tuned for {self.device}, no GPU is visible here"
        others = [name for name in here.gpus if name not in self.gpus]
        return f"tuned for {self.device}, here {others[0]}" if others else ""


def keys_below(root: str) -> list[str]:
    """`<version>/<arch>/<hash>` for every directory three levels down; links and hidden names are passed over."""
    found = [""]
    for _ in range(3):
        found = [f"{above}/{name}".lstrip("/") for above in found for name in _folders(os.path.join(root, above))]  # noqa: PTH118
    return found[:_MOST]


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    except OSError:
        return []


def read_baked(root: str, key: str) -> Baked:
    """Read what a start must know of a key; never raises: what is wrong is in `broken`."""
    place = Path(root) / key
    path = str(place / CACHE_FILE)
    try:
        return _described(place, key, json.loads(read_bytes(place / MANIFEST_FILE, _LARGEST)))
    except PipelineError as error:
        return Baked(key, path, f"its manifest cannot be used: {error.message}")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return Baked(key, path, "its manifest is damaged")


def _described(place: Path, key: str, manifest: dict[str, Any]) -> Baked:
    path = str(place / CACHE_FILE)
    if manifest["schema"] != SCHEMA:
        said = str(manifest["schema"])[:20]
        return Baked(key, path, f"its manifest has schema {said}, this entry point reads {SCHEMA}")
    if manifest["key"] != key:
        return Baked(key, path, "its manifest names another key")
    record, ranks = manifest["record"], manifest["ranks"]
    cpu = {str(name): str(value) for name, value in record["host"]["cpu"].items()}
    gpus = tuple(map(str, record["host"]["gpus"])) or (str(record["flashinfer"]["gpu"]),)
    files = {str(name): int(facts["size"]) for name, facts in manifest["files"].items()}
    wrong = [name for name, size in {CACHE_FILE: -1, **files}.items() if _size(place / name) != size]
    # Every rank has every entry but those that others own. The rows do not tell: one answer may have several keys.
    first = int(ranks[0]["rank"])
    others = sum(1 for holders in manifest["owners"].values() if first not in holders)
    return Baked(
        key,
        path,
        broken=f"its {wrong[-1]} is missing or has another size" if wrong else "",
        gpus=() if cpu else gpus,
        cpu=cpu,
        ranks=len(ranks),
        entries=int(ranks[0]["entries"]) + others,
        options=dict(manifest["options"]),
        files=files,
    )


def _size(path: Path) -> int:
    """Bytes of a regular file; -2 where there is none."""
    try:
        return path.stat().st_size if path.is_file() else -2
    except OSError:
        return -2


def choose(baked: Sequence[Baked], here: HostInfo, wanted: str = "") -> tuple[Baked | None, str]:
    """The key to use, or None and why not, in one line.

    `wanted` names one key, whole or by the first characters of its hash. Where several fit, the one tuned with as
    many ranks as GPUs are visible wins; what is still unclear is not guessed.
    """
    if wanted:
        baked = [b for b in baked if b.key == wanted or b.key.rpartition("/")[2].startswith(wanted)]
        if not baked:
            return None, f"no baked key is {wanted}"
    if not baked:
        return None, "no tuned cache is baked into this image"
    fitting = [b for b in baked if not b.broken and not b.mismatch(here)]
    if len(fitting) > 1 and here.gpus:
        fitting = [b for b in fitting if b.ranks == len(here.gpus)] or fitting
    if len(fitting) == 1:
        return fitting[0], ""
    if fitting:
        keys = ", ".join(b.key.rpartition("/")[2][:8] for b in fitting)
        return None, f"{len(fitting)} tuned caches fit {fitting[0].device} ({keys}): set PIPELINE_TUNED_KEY to one"
    reasons = dict.fromkeys(b.broken or b.mismatch(here) for b in baked)
    return None, "; ".join(reasons)
