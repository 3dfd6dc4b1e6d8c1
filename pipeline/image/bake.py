"""The step `bake`: the final stage, one layer per key, with labels that name them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .buildkit import Built, Export, Stage
from .caches import Baked
from .contexts import stage_key
from .labels import labels
from .prepare import Prepared
from .wrap import context_name


def bake(prepared: Prepared, keys: Sequence[Baked], export: Export | None = None) -> Built:
    """Build `final` with each key as a named context; the same keys give the same layers, exported or not."""
    prepared.staging.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        staged: dict[str, Path] = {}
        for at, one in enumerate(keys):
            folder = tempfile.TemporaryDirectory(dir=prepared.staging.folder, prefix="bake-")
            staged[context_name(at)] = stage_key(one, Path(stack.enter_context(folder)) / "tuned")
        stage = Stage(
            target="final",
            contexts={**prepared.contexts, **staged},
            arguments=prepared.arguments,
            labels=labels(keys, prepared.base.reference, prepared.modules),
            export=export,
        )
        return prepared.final_builder(len(keys)).build(stage)
