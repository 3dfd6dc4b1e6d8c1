"""The step `bake`: the final stage, one layer per key, with labels that name them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .buildkit import Built, Stage
from .caches import Baked
from .contexts import stage_key
from .prepare import Prepared
from .wrap import context_name

PREFIX = "io.github.tuned-image-pipeline"


def labels(keys: Sequence[Baked], base: str) -> dict[str, str]:
    """Labels of the finished image: what it is, and for each key its path, plan digest and manifest digest."""
    plans = [one.manifest.plan for one in keys]
    return {
        "org.opencontainers.image.title": f"{plans[0].model}, tuned",
        "org.opencontainers.image.base.name": base,
        f"{PREFIX}.key": ",".join(str(one.key) for one in keys),
        f"{PREFIX}.plan": ",".join(plan.digest for plan in plans),
        f"{PREFIX}.manifest": ",".join(one.manifest_sha256 for one in keys),
        f"{PREFIX}.flashinfer": plans[0].flashinfer_version,
        f"{PREFIX}.arch": ",".join(dict.fromkeys(one.key.arch for one in keys)),
    }


def bake(prepared: Prepared, keys: Sequence[Baked]) -> Built:
    """Build `final` with each key as a named context; the same keys give the same layers."""
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
            labels=labels(keys, prepared.base.reference),
        )
        return prepared.final_builder(len(keys)).build(stage)
