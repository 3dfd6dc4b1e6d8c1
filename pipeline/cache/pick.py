"""Which of the baked keys fits a host, from names, sizes and the manifests' records alone.

Imported by every start of a container: it imports json and os, and reads of a manifest no more than it must.
The whole record is compared where torch is imported (`judge`); here only its host half is.
"""

# Importing pathlib takes longer than all that this module does.
# ruff: noqa: PTH113, PTH118, PTH120, PTH123, PTH202
from __future__ import annotations

import json
import os
import stat

from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE

TYPE_CHECKING = False  # type checkers take it for true; importing typing to say so would cost milliseconds
if TYPE_CHECKING:
    from typing import Any

_LARGEST = 64 * 1024 * 1024  # bytes of a manifest
_MOST = 1000  # keys looked at
_SCHEMA = 1  # of manifests; `pipeline.contract.manifest` would take too long to import


class Half:
    """The host half of an environment: visible GPU names in order, or for a CPU its facts as the tuner records them."""

    __slots__ = ("cpu", "gpus")

    def __init__(self, gpus: tuple[str, ...] = (), cpu: dict[str, str] | None = None) -> None:
        self.gpus = gpus
        self.cpu = cpu or {}


class Baked:
    """One key as its manifest describes it; `broken` says in words what keeps it from being used."""

    __slots__ = ("broken", "cpu", "entries", "files", "gpus", "key", "options", "path", "ranks")

    def __init__(self, root: str, key: str) -> None:
        self.key = key
        self.path = os.path.join(root, *key.split("/"), CACHE_FILE)
        self.broken = ""
        self.gpus: tuple[str, ...] = ()
        self.cpu: dict[str, str] = {}
        self.ranks = 0
        self.entries = 0
        self.options: dict[str, Any] = {}
        self.files: dict[str, int] = {}  # name below the key's directory, size in bytes

    @property
    def device(self) -> str:
        """What it was tuned for, in words."""
        return ", ".join(dict.fromkeys(self.gpus)) or self.cpu.get("model", "an unknown device")

    def misfit(self, here: Half) -> str:
        """Why it does not fit a host; empty where it does."""
        if self.cpu:
            for name, value in self.cpu.items():
                found = here.cpu.get(name, "")
                if found != value:
                    what = (
                        f"{name} {value[:40]}, here {found[:40] or 'unknown'}" if name != "flags" else "other CPU flags"
                    )
                    return f"tuned for {what}"
            return ""
        if not here.gpus:
            return f"tuned for {self.device}, no GPU is visible here"
        others = [name for name in here.gpus if name not in self.gpus]
        return f"tuned for {self.device}, here {others[0]}" if others else ""


def keys_below(root: str) -> list[str]:
    """`<version>/<arch>/<hash>` for every directory three levels down; links and hidden names are passed over."""
    found: list[str] = []
    for version in _folders(root):
        for arch in _folders(os.path.join(root, version)):
            found += [f"{version}/{arch}/{digest}" for digest in _folders(os.path.join(root, version, arch))]
    return found[:_MOST]


def read_baked(root: str, key: str) -> Baked:
    """Read what a start must know of a key; never raises: what is wrong is in `broken`."""
    baked = Baked(root, key)
    try:
        path = os.path.join(os.path.dirname(baked.path), MANIFEST_FILE)
        data = _read(path)
        if data is None:
            baked.broken = "its manifest is not a regular file"
        elif len(data) > _LARGEST:
            baked.broken = "its manifest is too large"
        else:
            _fill(baked, data.decode("utf-8"))
    except OSError as error:
        baked.broken = f"its manifest cannot be read: {error.strerror}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        baked.broken = "its manifest is damaged"
    return baked


def _read(path: str) -> bytes | None:
    """A little more than the largest manifest; None for no regular file: a pipe nobody writes to would hold a start."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    with open(handle, "rb") as stream:
        return stream.read(_LARGEST + 1)


def _fill(baked: Baked, text: str) -> None:
    schema = _part(text, "schema")
    if schema != _SCHEMA:
        baked.broken = f"its manifest has schema {str(schema)[:20]}, this entry point reads {_SCHEMA}"
        return
    if _part(text, "key") != baked.key:
        baked.broken = "its manifest names another key"
        return
    record, ranks, owners = _part(text, "record"), _part(text, "ranks"), _part(text, "owners")
    host = record["host"]
    baked.gpus = tuple(str(name) for name in host["gpus"]) or (str(record["flashinfer"]["gpu"]),)
    baked.cpu = {str(k): str(v) for k, v in host["cpu"].items()}
    if baked.cpu:
        baked.gpus = ()
    baked.ranks = len(ranks)
    # Every rank holds every entry but those that others own. The rows would not tell: one answer may have several keys.
    first = int(ranks[0]["rank"])
    baked.entries = int(ranks[0]["entries"]) + sum(1 for holders in owners.values() if first not in holders)
    baked.options = dict(_part(text, "options"))
    baked.files = {str(name): int(facts["size"]) for name, facts in _part(text, "files").items()}
    for name, size in {CACHE_FILE: -1, **baked.files}.items():
        path = os.path.join(os.path.dirname(baked.path), name)
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            baked.broken = f"its {name} is missing or has another size"


def _part(text: str, name: str) -> Any:  # noqa: ANN401 - any JSON value
    """One top-level value. A manifest is written with an indent of two, so that its place is known without parsing:
    a JSON string holds no raw line break. Any other spelling is parsed whole."""
    start = text.find(f'\n  "{name}": ')
    if start >= 0:
        return json.JSONDecoder().raw_decode(text, start + len(name) + 7)[0]
    return json.loads(text)[name]


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError:
        return []
    return sorted(names)


def choose(baked: list[Baked], here: Half, wanted: str = "") -> tuple[Baked | None, str]:
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
    fitting = [b for b in baked if not b.broken and not b.misfit(here)]
    if len(fitting) > 1 and here.gpus:
        fitting = [b for b in fitting if b.ranks == len(here.gpus)] or fitting
    if len(fitting) == 1:
        return fitting[0], ""
    if fitting:
        keys = ", ".join(b.key.rpartition("/")[2][:8] for b in fitting)
        return None, f"{len(fitting)} tuned caches fit {fitting[0].device} ({keys}): set PIPELINE_TUNED_KEY to one"
    reasons = dict.fromkeys(b.broken or b.misfit(here) for b in baked)
    return None, "; ".join(reasons)
