"""Where engines look for FlashInfer's tuned tactics, an adapter for each way.

An adapter knows the paths, gathers what an engine left behind into one `Group` per set of files that belong together,
checks a group by the engine's own rule for using it, and says how a copy is offered to the engine at start. Paths and
rules were read in the published packages; `tests/unit/test_cache_layouts_published.py` holds them against those.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.cache.engine_variables import enters_028
from pipeline.contract.errors import UsageError
from pipeline.contract.plan import EngineRun

from .group import Group, Offer

NAMES = ("plain", "vllm", "sglang")


class LayoutUnknown(UsageError):
    """There is no adapter of that name."""


class Layout(Protocol):
    """The module of one engine's layout."""

    NAME: str

    def gather(self, root: str) -> tuple[Group, ...]:
        """All groups below the directory that the engine calls its own, in order; links are not followed."""

    def check(self, group: Group) -> tuple[str, ...]:
        """Why the engine would not use a group, or must not; empty when it would."""

    def offer(self, group: Group) -> Offer:
        """Which variable points the engine to a copy, and where below that directory the files must lie."""


def layout_of(name: str) -> Layout:
    """The adapter of an engine; raise `LayoutUnknown`."""
    if name not in NAMES:
        raise LayoutUnknown(f"there is no cache layout {name!r}", hint=f"layouts: {', '.join(NAMES)}")
    module: Layout = importlib.import_module(f"pipeline.cache.layouts.{name}")
    return module


def describe(layout: Layout, group: Group, run: EngineRun, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a manifest says in `options["layout"]`, so that the entry point can offer the key's files to the engine.

    With it lies what enters the engine's own hash as far as we can see it: the words after its serve command, and in
    `variables` those of the environment that it ran in; left out where none enters.
    """
    offer = layout.offer(group)
    said: dict[str, Any] = {
        "engine": layout.NAME,
        "version": run.version,
        "variable": offer.variable,
        "directory": offer.directory,
        "writes": offer.writes,
        "model": run.model,
        "arguments": list(run.arguments),
    }
    if layout.NAME == "vllm" and group.parts.get("kind") == "shared":
        said["variables"] = {name: value for name, value in sorted(environment.items()) if enters_028(name)}
    return said
