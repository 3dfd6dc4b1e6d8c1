"""Why a deployment would miss what is baked: its words and environment against those of the warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import kinds
from .adapter import Adapter
from .known import adapter_of
from .manifest import ServerManifest
from .words import HIDDEN, Words, options

_NAMES = {"model-tag": "model", "model-path": "model", "tp": "tensor-parallel-size", "tp-size": "tensor-parallel-size"}


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
    """What differs, the certain misses first. `environment` is what the deployment sets beside the image's ENV."""
    adapter = adapter_of(told.server)
    found = [*_arguments(told, adapter, arguments), *_environment(told, adapter, environment)]
    return tuple(sorted(found, key=lambda one: (not one.certain, one.name)))


def _named(words: Words, adapter: Adapter) -> dict[str, str]:
    found = {_NAMES.get(name, name): value for name, value in options(words.arguments).items()}
    if words.server == "vllm" and "argument 1" in found:
        found["model"] = found.pop("argument 1")
    return {name: value for name, value in found.items() if name not in adapter.ignored()}


def _arguments(told: ServerManifest, adapter: Adapter, arguments: Sequence[str]) -> list[Difference]:
    now = _named(Words(told.server, tuple(arguments)), adapter)
    baked = _named(Words(told.server, told.arguments), adapter)
    found = []
    for name in sorted({*now, *baked}):
        one, two = now.get(name, ""), baked.get(name, "")
        if one == two or HIDDEN in (one, two):
            continue
        remark = "its spelling enters the hash" if name == "model" and one.rstrip("/") == two.rstrip("/") else ""
        found.append(Difference(name.replace("-", "_"), one, two, remark=remark))
    return found


def _environment(told: ServerManifest, adapter: Adapter, environment: Mapping[str, str]) -> list[Difference]:
    placed = adapter.environment(kinds.ROOT)
    found = []
    for name, value in sorted(environment.items()):
        baked = told.environment.get(name, "")
        if value == baked:
            continue
        if name in placed:
            found.append(Difference(name, value, baked, remark="it places a cache"))
        elif name == "HF_HUB_OFFLINE" and value.lower() in ("0", "false", "off", "no", ""):
            found.append(Difference(name, value or "empty", "1", remark="an online server names a hub model otherwise"))
        elif name in told.secrets:
            found.append(Difference(name, HIDDEN, HIDDEN, certain=False, remark="a secret: not compared"))
        elif adapter.enters(name, told.hashed):
            secret = "KEY" in name or "TOKEN" in name
            found.append(
                Difference(name, HIDDEN if secret else value, baked, certain=bool(told.hashed), remark="in its hash")
            )
    return found


def report(told: ServerManifest, differences: Sequence[Difference]) -> list[str]:
    """Lines for people."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(told.versions.items()))
    lines = [f"{told.server} warmed up on {told.device}: {versions}"]
    lines += [str(one) for one in differences]
    if not differences:
        lines.append("nothing differs from what was baked")
    lines.append("the server's own hash was not computed: these are its words, compared")
    return lines
