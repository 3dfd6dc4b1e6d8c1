"""The step `bake`: the finished image, a layer for each cache of a warm-up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import BuildError

from .buildx import Build, Built, Export, build
from .contexts import Destination, Staging, stage_layer
from .dockerfile import ENTRY, Layer, Runs, finished, stat_digest
from .names import ENTRYPOINT, ENVIRONMENT, INPUTS, PREFIX, PRODUCER
from .probe import destinations
from .producer import CacheDir, WarmUp
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
    with log.step("bake the caches into the last layers"):
        layers, contexts = [], dict(inputs.recipe.contexts)
        for at, one in enumerate(warm.caches):
            name, where = f"cache-{at}", places[one.path]
            contexts[name] = _staged(session, name, warm.root, one, where)
            layers.append(Layer(name, where.path, linked=where.linked))
            if not where.linked:
                log.note(
                    f"{where.path} lies in a folder of another owner, which keeps it: this layer has its own digest"
                )
        runs, wrap = Runs.of(inputs.base.config), inputs.producer.name == "tune"
        text = finished(inputs.recipe.dockerfile, layers, warm.environment, runs, wrap=wrap)
        wanted = Build(
            text, "final", contexts, inputs.recipe.arguments, labels(inputs, warm), tag=session.candidate, export=export
        )
        return build(session, wanted if export is None else replace(wanted, tag=""))


def _staged(session: Session, name: str, root: Path, one: CacheDir, where: Destination) -> Path:
    """The context of one cache, by the sizes and times of its files, which the store has settled by their content."""
    content = [stat_digest(root / one.path.lstrip("/")), asdict(one), asdict(where)]

    def make(place: Path) -> Path:
        return stage_layer(root, one.path, where, place, keep_times=one.keep_times, writable=one.writable)

    return Staging(session.home).make(name, content, make)


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
    entry = {
        ENTRYPOINT: f"{ENTRY} checks the cache against the device; without it the variables of the label environment "
        "still name it, unchecked"
    }
    return {
        **found,
        PRODUCER: inputs.producer.name,
        INPUTS: inputs.digest,
        f"{PREFIX}.model": inputs.producer.model,
        ENVIRONMENT: json.dumps(dict(warm.environment), sort_keys=True),
        **(entry if inputs.producer.name == "tune" else {}),
        **warm.labels,
    }


def manifests_of(warm: WarmUp) -> dict[str, Path]:
    """The manifests of a warm-up: path in the image to file on the host."""
    return {path: warm.root / path.lstrip("/") for path in warm.manifests}
