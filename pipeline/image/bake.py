"""The step `bake`: the finished image, a layer for each cache of a warm-up.

The host appends to the last stage of a committed Dockerfile what only it knows: a COPY for each cache, the static
environment, and what the base runs. A Dockerfile cannot say "the base's own ENTRYPOINT with a word in front": setting
ENTRYPOINT drops the inherited CMD, and its JSON form expands no ARG.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.contract.errors import BuildError
from pipeline.contract.places import ENV_FILE

from .buildx import Build, Built, Export, build, stat_digest
from .contexts import Destination, Staging, stage_layer
from .names import ENTRYPOINT, ENVIRONMENT, INPUTS, KEY, PIPELINE_RUN, PREFIX, PRODUCER
from .probe import destinations
from .producer import CacheDir, WarmUp
from .resolve import Inputs
from .session import Session

_NOTHING = ("/bin/sh",)  # an image that runs nothing of its own still starts with something
_OCI = "org.opencontainers.image"


@dataclass(frozen=True)
class Runs:
    """What an image runs: user as its configuration spells it (empty: root), entry point and command in JSON form."""

    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]

    @staticmethod
    def of(config: Mapping[str, Any]) -> Runs:
        """Read an image's Config."""
        return Runs(
            str(config.get("User") or ""), tuple(config.get("Entrypoint") or ()), tuple(config.get("Cmd") or ())
        )

    def plain(self) -> str:
        """The base's own, which our layers leave as they are but for the user who wrote them."""
        return f"USER {self.user or 'root'}"

    def wrapped(self) -> str:
        """The same below pipeline-run. A base that is wrapped already is not wrapped twice."""
        inner = self.entrypoint[1:] if self.entrypoint[:1] == (PIPELINE_RUN,) else self.entrypoint
        command = self.command if self.command or inner else _NOTHING
        lines = [f"USER {self.user or 'root'}", f"ENTRYPOINT {json.dumps([PIPELINE_RUN, *inner])}"]
        return "\n".join([*lines, f"CMD {json.dumps(list(command))}"] if command else lines)


@dataclass(frozen=True)
class Layer:
    """One COPY: a named context that holds `path` and all above it.

    A linked layer brings its own parent directories, root's, so that it is the same on every base. Where the base has a
    parent that is somebody else's, a plain COPY leaves that as it is (`linked` False).
    """

    context: str
    path: str
    linked: bool = True

    def line(self) -> str:
        """The instruction."""
        if self.linked:
            return f"COPY --link --from={self.context} / /"
        return f"COPY --from={self.context} {self.path} {self.path}"


def finished(
    template: bytes, layers: Sequence[Layer], environment: Mapping[str, str], runs: Runs | None, *, wrap: bool = True
) -> bytes:
    """The Dockerfile with the caches, the environment and what the image runs at its end.

    A server's caches are found by the environment alone, so that its image runs what the base does (`wrap` False).
    """
    lines = [layer.line() for layer in layers]
    lines += [f"ENV {name}={json.dumps(value).replace('$', chr(92) + '$')}" for name, value in environment.items()]
    lines += [runs.wrapped() if wrap else runs.plain()] if runs is not None else []
    return template.rstrip(b"\n") + "\n".join(["", *lines, ""]).encode()


def bake(inputs: Inputs, warm: WarmUp, session: Session, export: Export | None = None) -> Built:
    """Build the finished image; the same warm-up gives the same layers, exported or not."""
    now = session.client.images.get(inputs.base.reference).id
    if str(now) != inputs.base.image_id:
        raise BuildError(
            f"{inputs.base.reference} became another image meanwhile ({str(now)[:19]}…)", hint="run it again"
        )
    # A cache that lies in another's directory goes with it.
    caches = [one for one in warm.caches if not any(one.path.startswith(f"{other.path}/") for other in warm.caches)]
    places = destinations(session, inputs.base, [one.path for one in caches])
    with log.step("bake the caches into the last layers"):
        layers, contexts = [], dict(inputs.recipe.contexts)
        for at, one in enumerate(caches):
            name, where = f"cache-{at}", places[one.path]
            contexts[name] = _staged(session, name, warm.root, one, where)
            layers.append(Layer(name, where.path, linked=where.linked))
            if not where.linked:
                log.note(
                    f"{where.path} lies in a folder that root does not own: this layer's digest differs at each build"
                )
        runs, wrap = Runs.of(inputs.base.config), inputs.producer.name == "tune"
        text = finished(inputs.recipe.dockerfile, layers, warm.environment, runs, wrap=wrap)
        wanted = Build(
            text, "final", contexts, inputs.recipe.arguments, labels(inputs, warm), tag=session.unnamed, export=export
        )
        return build(session, wanted if export is None else replace(wanted, tag=""))


def beside_those_of_base(warm: WarmUp, before: Mapping[str, str]) -> WarmUp:
    """The warm-up with the labels of all keys, where the base has some: those first, unless they are baked anew.

    No variable names one file then: with several keys pipeline-run chooses.
    """
    added = warm.labels
    if not before.get(KEY) or not added.get(KEY):
        return warm
    names = (KEY, f"{PREFIX}.plan", f"{PREFIX}.manifest")
    rows = {
        row[0]: row
        for labels in (before, added)
        for row in zip(*(labels.get(name, "").split(",") for name in names), strict=False)
    }
    found = {name: ",".join(row[at] for row in rows.values()) for at, name in enumerate(names)}
    for name in (f"{PREFIX}.flashinfer", f"{PREFIX}.arch"):
        found[name] = ",".join(dict.fromkeys(f"{before.get(name, '')},{added[name]}".strip(",").split(",")))
    environment = {**warm.environment, ENV_FILE: ""} if len(rows) > 1 else warm.environment
    return replace(warm, labels={**added, **found}, environment=environment)


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
        ENTRYPOINT: f"{PIPELINE_RUN} checks the cache against the device; without it the variables of the label "
        "environment still name it, unchecked"
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
