"""The step `bake`: the finished image, a layer for each cache of a warm-up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import BuildError
from pipeline.contract.scratch import scratch

from .buildx import Build, Built, Export, build
from .contexts import stage_layer
from .dockerfile import ENTRY, Layer, Runs, finished
from .names import ENTRYPOINT, ENVIRONMENT, INPUTS, PREFIX, PRODUCER
from .probe import destinations
from .producer import WarmUp
from .resolve import Inputs
from .session import Session

_OCI = "org.opencontainers.image"


def bake(inputs: Inputs, warm: WarmUp, session: Session, export: Export | None = None) -> Built:
    """Build the finished image; the same warm-up gives the same layers, exported or not."""
    now = session.client.images.get(inputs.base.reference).id
    if str(now) != inputs.base.image_id:
        raise BuildError(
            f"{inputs.base.reference} became another image meanwhile ({str(now)[:19]}…)", hint="run it again"
        )
    places = destinations(session, inputs.base, [one.path for one in warm.caches])
    folder = session.home / "contexts"
    folder.mkdir(parents=True, exist_ok=True)
    with log.step("bake the caches into the last layers"), scratch(folder, ".bake-") as work:
        layers, contexts = [], dict(inputs.recipe.contexts)
        for at, one in enumerate(warm.caches):
            name, where = f"cache-{at}", places[one.path]
            contexts[name] = stage_layer(
                warm.root, one.path, where, work / name, keep_times=one.keep_times, writable=one.writable
            )
            layers.append(Layer(name, where.path, linked=where.linked))
            if not where.linked:
                log.note(
                    f"{where.path} lies in a folder of another owner, which keeps it: this layer has its own digest"
                )
        text = finished(inputs.recipe.dockerfile, layers, warm.environment, Runs.of(inputs.base.config))
        wanted = Build(
            text, "final", contexts, inputs.recipe.arguments, labels(inputs, warm), tag=session.candidate, export=export
        )
        return build(session, wanted if export is None else _untagged(wanted))


def _untagged(wanted: Build) -> Build:
    from dataclasses import replace

    return replace(wanted, tag="")


def labels(inputs: Inputs, warm: WarmUp) -> dict[str, str]:
    """The labels of the finished image. Those of the base stay, its title and version included."""
    own: Mapping[str, str] = inputs.base.config.get("Labels") or {}
    usual = {
        f"{_OCI}.title": f"{inputs.producer.model}, warmed up",
        f"{_OCI}.version": f"{inputs.version}-{inputs.digest[:8]}",
    }
    found = {name: value for name, value in usual.items() if name not in own}
    found[f"{_OCI}.base.name"] = inputs.base.reference
    if inputs.base.digest:
        found[f"{_OCI}.base.digest"] = inputs.base.digest
    return {
        **found,
        PRODUCER: inputs.producer.name,
        INPUTS: inputs.digest,
        f"{PREFIX}.model": inputs.producer.model,
        ENVIRONMENT: json.dumps(dict(warm.environment), sort_keys=True),
        ENTRYPOINT: f"{ENTRY} checks the cache against the device; without it the variables of the label environment "
        "still name it, unchecked",
        **warm.labels,
    }


def manifests_of(warm: WarmUp) -> dict[str, Path]:
    """The manifests of a warm-up: path in the image to file on the host."""
    return {path: warm.root / path.lstrip("/") for path in warm.manifests}
