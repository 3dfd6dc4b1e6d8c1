"""What an image says of the server's starts that it was warmed up with, and what a deployment would do otherwise.

No value of a secret is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.contract.errors import CacheRefused

from . import kinds
from .adapters import Adapter, adapter_of
from .judge import Summary
from .words import HIDDEN, ON, Words

SCHEMA = 2
FILE = f"{kinds.PLACE}/manifest.json"
_NAMES = {"model-tag": "model", "model-path": "model", "tp": "tensor-parallel-size", "tp-size": "tensor-parallel-size"}


@dataclass(frozen=True)
class Served:
    """One set of arguments that was started: secrets are hidden; `model` maps the absolute paths of its config files to
    their text.
    """

    arguments: tuple[str, ...]
    model: Mapping[str, str]
    cold: Summary
    warm: Summary

    def table(self) -> list[str]:
        """Lines for people: seconds by phase."""
        cold, warm = ({**one.seconds, "ready": one.ready} for one in (self.cold, self.warm))
        rows = [f"{'seconds':<24}{'cold':>8}{'warm':>8}"]
        for name in sorted({**cold, **warm}, key="ready".__eq__):
            shown = "".join(f"{one[name]:>8.1f}" if name in one else " " * 8 for one in (cold, warm))
            rows.append(f"{name:<24}{shown}")
        return rows


@dataclass(frozen=True)
class ServerManifest:
    """`environment` is the image's static ENV, `hashed` names the variables that the server itself says enter its
    hashes, and `caches` maps kinds to bytes.
    """

    server: str
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    versions: Mapping[str, str]
    hashed: tuple[str, ...]
    device: str
    sets: tuple[Served, ...]
    caches: Mapping[str, int]
    not_baked: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def read(text: str) -> ServerManifest:
        """From JSON text. Raises `CacheRefused`."""
        try:
            value = json.loads(text)
            if value.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            sets = tuple(
                Served(
                    tuple(one["arguments"]), one["model"], Summary.read(one["cold"]), Summary.read(one["warm"])
                )
                for one in value["sets"]
            )  # fmt: skip
            lists = {name: tuple(value[name]) for name in ("secrets", "hashed", "notes")}
            return ServerManifest(**{**value, **lists, "sets": sets})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheRefused(f"{FILE} is no manifest of a server: {error}", hint="warm up again") from error

    def table(self) -> list[str]:
        """Lines for people: seconds by phase of each set, megabytes by kind."""
        rows = []
        for one in self.sets:
            rows += [" ".join(one.arguments)] if len(self.sets) > 1 else []
            rows += one.table()
        return rows + [f"{kind:<24}{size / 1e6:>8.1f} MB" for kind, size in sorted(self.caches.items())]


@dataclass(frozen=True)
class Difference:
    """One field. `certain` says that it enters a hash or places a cache; otherwise it may."""

    name: str
    now: str
    baked: str
    certain: bool = True
    remark: str = ""

    def __str__(self) -> str:
        now, baked = self.now or "not given", self.baked or "without it"
        said = f"{self.name} {now}, baked {'with ' if self.baked else ''}{baked}"
        return said + (f" ({self.remark})" if self.remark else "") + ("" if self.certain else ": may be a miss")


def explain(told: ServerManifest, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Difference, ...]:
    """What differs from the set that is nearest, the certain misses first.

    `environment` is what the deployment sets beside the image's ENV.
    """
    adapter = adapter_of(told.server)
    now = _named(Words(told.server, tuple(arguments)), adapter)
    words = min((_arguments(now, _named(Words(told.server, one.arguments), adapter)) for one in told.sets), key=len)
    found = [*words, *_environment(told, adapter, environment)]
    return tuple(sorted(found, key=lambda one: (not one.certain, one.name)))


def _named(words: Words, adapter: Adapter) -> dict[str, str]:
    found = {_NAMES.get(name, name): value for name, value in words.options.items()}
    if words.server == "vllm" and "argument 1" in found:
        found["model"] = found.pop("argument 1")
    return {name: value for name, value in found.items() if name not in adapter.ignored}


def _arguments(now: Mapping[str, str], baked: Mapping[str, str]) -> list[Difference]:
    found = []
    for name in sorted({*now, *baked}):
        one, two = now.get(name, ""), baked.get(name, "")
        if one == two or HIDDEN in (one, two):
            continue
        remark = "its spelling enters the hash" if name == "model" and one.rstrip("/") == two.rstrip("/") else ""
        found.append(Difference(name.replace("-", "_"), one, two, remark=remark))
    return found


def _environment(told: ServerManifest, adapter: Adapter, environment: Mapping[str, str]) -> list[Difference]:
    found = []
    for name, value in sorted(environment.items()):
        baked = told.environment.get(name, "")
        if value == baked:
            continue
        if name in adapter.places:
            found.append(Difference(name, value, baked, remark="it places a cache"))
        elif name == kinds.COLD and value:
            found.append(Difference(name, value, baked, remark="it starts without the baked caches"))
        elif name == "HF_HUB_OFFLINE" and value.lower() not in ON and _from_hub(told):
            found.append(Difference(name, value, baked, remark="an online server names a hub model otherwise"))
        elif name in told.secrets:
            found.append(Difference(name, HIDDEN, HIDDEN, certain=False, remark="a secret: not compared"))
        elif adapter.enters(name, told.hashed):
            secret = "KEY" in name or "TOKEN" in name
            found.append(
                Difference(name, HIDDEN if secret else value, baked, certain=bool(told.hashed), remark="in its hash")
            )
    return found


def _from_hub(told: ServerManifest) -> bool:
    return any(not Words(told.server, one.arguments).model.startswith("/") for one in told.sets)


def report(told: ServerManifest, differences: Sequence[Difference], hashes: Sequence[str]) -> list[str]:
    """Lines for people. `hashes` are the server's own, of each set and of the deployment; empty where none is known."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(told.versions.items()))
    lines = [f"{told.server} warmed up on {told.device}: {versions}"]
    lines += [str(one) for one in differences]
    if not differences:
        lines.append("nothing differs from what was baked")
    if hashes:
        same = "what was baked" if hashes[-1] in hashes[:-1] else "nothing that was baked"
        lines.append(f"the server's own hash of its configuration is that of {same}")
    else:
        lines.append("the server's own hash was not computed: only arguments and variables were compared")
    return lines
